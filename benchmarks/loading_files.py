"""Loading a checkpoint of many small tensors: CPU seconds of a rank, files it opens, headers it reads, names it walks.

    python3 -m benchmarks.loading_files                      # plain, 2, 4 ranks; 94 layers of 128 experts, 141 files
    python3 -m benchmarks.loading_files --layers 4 --experts 8 --files 5

The tensors are tiny, so nothing but bookkeeping is measured. CPU seconds (user and system) hardly change when other
work runs on the machine; counts do not change at all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any


def write_checkpoint(directory: str, layers: int, experts: int, files: int) -> int:
    """A Qwen3-MoE checkpoint of per-expert tensors, spread over files in order; number of its tensors."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from benchmarks.loading_memory import _pieces

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=experts,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        shapes |= _pieces(name, parameter.shape)
    keys, weight_map = list(shapes), {}
    for number in range(files):
        held = keys[number * len(keys) // files : (number + 1) * len(keys) // files]
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file({key: torch.randn(shapes[key]) for key in held}, os.path.join(directory, file), {"format": "pt"})
        weight_map.update(dict.fromkeys(held, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    Path(directory, "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.architectures, config.dtype = [type(model).__name__], "float32"
    config.save_pretrained(directory)
    return len(keys)


def count_calls(counts: Counter[str]) -> None:
    """From now on openings of weight files, headers read here and names renamed are counted in this process."""
    import safetensors
    from transformers import core_model_loading, modeling_utils

    from hf_fsdpturbo.loading import files

    def counted(what: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return function(*args, **kwargs)

        return call

    opened = counted("files opened", safetensors.safe_open)
    safetensors.safe_open = modeling_utils.safe_open = opened  # type: ignore[assignment]
    core_model_loading.rename_source_key = counted("names walked", core_model_loading.rename_source_key)
    files.safetensors_header = counted("headers read", files.safetensors_header)  # type: ignore[assignment]


def load(path: str, ranks: int, check: str) -> None:
    """Load as the trainer does; with no ranks, as plain Transformers does."""
    import torch
    from transformers import AutoModelForCausalLM

    build = AutoModelForCausalLM.from_pretrained
    if not ranks:
        build(path, dtype=torch.float32)
        return
    from hf_fsdpturbo import FSDPTurboParallelState, FSDPTurboTrainingArguments
    from hf_fsdpturbo.loading.seam import load_sharded
    from hf_fsdpturbo.parallel_state import Topology
    from hf_fsdpturbo.parallelize.order import parallelize_model

    sizes = {"ep_size": ranks}
    state = FSDPTurboParallelState.initialize(Topology.resolve(ranks, **sizes), "cpu")
    args = FSDPTurboTrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none", dist_config=sizes)
    load_sharded(
        path,
        build,
        lambda whole: parallelize_model(whole, args, state)[0],
        device=torch.device("cpu"),
        dtype=torch.float32,
        check_loading=check,
    )


def one_rank(rank: int, path: str, port: int, ranks: int, options: argparse.Namespace, results: Any) -> None:
    """A process of its own; ``ranks`` 0 is plain Transformers."""
    world = str(max(ranks, 1))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", TQDM_DISABLE="1")
    import torch.distributed as dist
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401  (imports are not what is measured)
    import trl  # noqa: F401

    if ranks:
        import hf_fsdpturbo.parallelize.order  # noqa: F401

        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    counts: Counter[str] = Counter()
    count_calls(counts)
    profile: Any = None
    if options.profile and rank == 0:
        import cProfile

        profile = cProfile.Profile()
        profile.enable()
    before = os.times()
    load(path, ranks, options.check)
    after = os.times()
    if profile is not None:
        import pstats

        profile.disable()
        pstats.Stats(profile).sort_stats(options.profile).print_stats(45)
    seconds = after.user + after.system - before.user - before.system
    results.put((rank, {"CPU seconds": seconds, "seconds": after.elapsed - before.elapsed, **counts}))


def measure(path: str, ranks: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """Figures of each rank."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=one_rank, args=(rank, path, store.port, ranks, options, results))
        for rank in range(max(ranks, 1))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed")
    found = dict(results.get() for _ in processes)
    return [found[rank] for rank in sorted(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="0,2,4", help="numbers of ranks; 0 is plain Transformers")
    parser.add_argument("--layers", type=int, default=94)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--files", type=int, default=141)
    parser.add_argument("--check", default="sample", help="check_loading: sample, full or off")
    parser.add_argument("--profile", default="", help="print a profile of rank 0, sorted by this: cumtime or tottime")
    parser.add_argument("--keep", default="", help="folder of the checkpoint: written there, or used if it is there")
    options = parser.parse_args()
    columns = ("CPU seconds", "seconds", "files opened", "headers read", "names walked")
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or temporary
        if not os.path.exists(os.path.join(directory, "config.json")):
            os.makedirs(directory, exist_ok=True)
            number = write_checkpoint(directory, options.layers, options.experts, options.files)
            print(f"{number} tensors in {options.files} files")
        print(f"| ranks | rank | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
        for ranks in map(int, options.ranks.split(",")):
            for rank, row in enumerate(measure(directory, ranks, options)):
                numbers = [f"{row.get(name, 0):.1f}" if "sec" in name else f"{row.get(name, 0):,}" for name in columns]
                print(f"| {ranks or 'plain'} | {rank} | {' | '.join(numbers)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
