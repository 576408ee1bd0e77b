"""Peak anonymous memory of a rank while it loads: below its own shard plus three of its largest stacked tensors.

    python benchmarks/loading_memory.py            # two ranks, EP 2, a checkpoint of 1.2 GB in a temporary folder
    python benchmarks/loading_memory.py --ranks 4 --efsdp 2 --stock
    python benchmarks/loading_memory.py --fp8      # the same model in FP8, dequantised while it loads

Measured is RssAnon of /proc/self/status over its value just before loading, every millisecond: pages of the process's
own, so safetensors' memory map of the files does not count. ``--stock`` measures what others need: one whole model a
rank. The exit status is 1 when a rank went above the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

MEBI = 2**20


def rss_anon() -> int:
    """Anonymous resident memory of this process in bytes (Linux)."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


class PeakMeter:
    """Watches RssAnon in a thread; ``peak`` is bytes over the value at entry."""

    def __enter__(self) -> PeakMeter:
        self.start = self.highest = rss_anon()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.highest = max(self.highest, rss_anon())
            time.sleep(0.001)

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        return max(self.highest, rss_anon()) - self.start


def write_checkpoint(directory: str, layers: int, experts: int, hidden: int, ffn: int, fp8: bool = False) -> int:
    """A Qwen3-MoE checkpoint with per-expert tensors, written layer by layer; returns its parameters.

    With ``fp8`` experts are FP8 with a scale for 128 x 128.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=ffn,
        moe_intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    files: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        part = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(part, {}).update(_pieces(name, parameter.shape))
    weight_map = {}
    for number, tensors in enumerate(files.values(), 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        drawn = {key: 0.02 * torch.randn(shape) for key, shape in tensors.items()}
        for key in [key for key in drawn if fp8 and ".experts." in key]:
            drawn[key] = drawn[key].to(torch.float8_e4m3fn)
            drawn[f"{key}_scale_inv"] = torch.rand([-(-size // 128) for size in drawn[key].shape])
        save_file(drawn, os.path.join(directory, file))
        weight_map.update(dict.fromkeys(drawn, file))
    total = sum(parameter.numel() for parameter in model.parameters())
    index = {"metadata": {"total_size": 4 * total}, "weight_map": weight_map}
    Path(directory, "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.architectures, config.dtype = [type(model).__name__], "float32"
    if fp8:
        config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(directory)
    return total


def _pieces(name: str, shape: Any) -> dict[str, Any]:
    """Checkpoint names and shapes of one parameter: experts apart, gate and up apart."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: shape}
    base = name.rpartition(".")[0]
    if name.endswith("down_proj"):
        return {f"{base}.{e}.down_proj.weight": shape[1:] for e in range(shape[0])}
    half = (shape[1] // 2, shape[2])
    return {f"{base}.{e}.{part}.weight": half for e in range(shape[0]) for part in ("gate_proj", "up_proj")}


def load(path: str, options: argparse.Namespace) -> dict[str, float]:
    """Load as the trainer does; figures of this rank in MiB."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_fsdpturbo import FSDPTurboParallelState, FSDPTurboTrainingArguments
    from hf_fsdpturbo.loading.seam import load_sharded
    from hf_fsdpturbo.parallel_state import Topology
    from hf_fsdpturbo.parallelize.order import parallelize_model

    sizes = {"ep_size": options.ranks // options.efsdp, "efsdp_size": options.efsdp}
    state = FSDPTurboParallelState.initialize(Topology.resolve(options.ranks, **sizes), "cpu")
    args = FSDPTurboTrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none", dist_config=sizes)
    build = AutoModelForCausalLM.from_pretrained
    begun = time.monotonic()
    with PeakMeter() as meter:
        if options.stock:
            model = build(path, dtype=torch.float32)
        else:
            model = load_sharded(
                path,
                build,
                lambda whole: parallelize_model(whole, args, state)[0],
                device=torch.device("cpu"),
                dtype=torch.float32,
                check_loading=options.check,
            )
    seconds = time.monotonic() - begun
    local = {name: getattr(p, "_local_tensor", p) for name, p in model.named_parameters()}
    sizes_by_name = {name: tensor.numel() * tensor.element_size() for name, tensor in local.items()}
    stacked = [size for name, size in sizes_by_name.items() if ".experts." in name]
    shard, largest = sum(sizes_by_name.values()), max(stacked)
    return {
        "peak": meter.peak / MEBI,
        "after": (rss_anon() - meter.start) / MEBI,
        "shard": shard / MEBI,
        "largest": largest / MEBI,
        "bound": (shard + 3 * largest) / MEBI,
        "seconds": seconds,
    }


def one_rank(rank: int, path: str, port: int, options: argparse.Namespace) -> None:
    """A fresh process of its own: nothing of another rank's memory is shared with it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.ranks),
        LOCAL_WORLD_SIZE=str(options.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found: list[Any] = [None] * options.ranks
    dist.all_gather_object(found, load(path, options))
    within = report(found, options) if rank == 0 else True
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if within or options.stock else 1)


def report(found: list[dict[str, float]], options: argparse.Namespace) -> bool:
    """A table, and one line of JSON for scripts; whether every rank stayed within the bound."""
    print(f"{'rank':>4} {'shard':>9} {'largest':>9} {'bound':>9} {'peak':>9} {'after':>9} MiB {'seconds':>8}")
    for rank, row in enumerate(found):
        columns = " ".join(f"{row[name]:9.1f}" for name in ("shard", "largest", "bound", "peak", "after"))
        verdict = "within" if row["peak"] < row["bound"] else "ABOVE"
        print(f"{rank:4d} {columns}     {row['seconds']:8.2f}   {verdict} the bound")
    worst = max(row["peak"] / row["bound"] for row in found)
    print(json.dumps({**vars(options), "peak_over_bound": round(worst, 3)}))
    return worst < 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--efsdp", type=int, default=1, help="ranks that share an expert; ep = ranks / efsdp")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1024)
    parser.add_argument("--check", default="sample", help="check_loading: sample, full or off")
    parser.add_argument("--fp8", action="store_true", help="a release whose experts are FP8")
    parser.add_argument("--stock", action="store_true", help="plain from_pretrained on every rank, for comparison")
    options = parser.parse_args()
    import multiprocessing

    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    with tempfile.TemporaryDirectory() as directory:
        sizes = options.layers, options.experts, options.hidden, options.ffn
        total = write_checkpoint(directory, *sizes, fp8=options.fp8)
        print(f"whole model: {4 * total / MEBI:.0f} MiB in float32, {options.ranks} ranks")
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=one_rank, args=(rank, directory, store.port, options))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(process.exitcode or 0 for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
