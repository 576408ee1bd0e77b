"""A large model's load, save, export and resume, rehearsed at its real widths with a few of its layers.

    python3 -m benchmarks.rehearsal --tiny              # seconds: is everything in place?
    python3 -m benchmarks.rehearsal                     # Qwen3-30B-A3B, 2 layers, 4 ranks: 14 GB of memory, 19 of disk
    python3 -m benchmarks.rehearsal --ranks 8 --layers 8 --folder /scratch

For each operation, the worst rank's growth of anonymous memory, seconds, and the bytes that all ranks read and wrote,
against the bytes that must move. No step is trained: AdamW's moments are filled by hand. Memory maps of weight files
are counted by the slices that are read of them. The exit status is 1 where bytes are above 1.3 times what must move
(but for ``--tiny``).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_memory import MB, Peak, run

BOUND = 1.3
SIZES = {  # hidden, ffn of an expert, experts, experts a token, heads, key-value heads, head dim, vocabulary
    "qwen3-30b-a3b": (2048, 768, 128, 8, 32, 4, 128, 151936),
    "qwen3-235b-a22b": (4096, 1536, 128, 8, 64, 4, 128, 151936),
    "tiny": (64, 32, 8, 2, 4, 2, 16, 512),
}


def write_release(directory: str, size: str, layers: int) -> None:
    """Weights in bfloat16 under the released names, an expert's tensors apart, a file for each layer and the rest."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

    from benchmarks.loading_memory import _pieces

    hidden, ffn, experts, top_k, heads, kv_heads, head_dim, vocabulary = SIZES[size]
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, num_experts=experts, num_experts_per_tok=top_k,
        moe_intermediate_size=ffn, intermediate_size=4 * ffn, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    files: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        part = name.split(".")[2] if ".layers." in name else name.split(".")[-2]
        files.setdefault(part, {}).update(_pieces(name, parameter.shape))
    weight_map, noise = {}, 0.02 * torch.randn(2**20, dtype=torch.float32).bfloat16()
    for number, shapes in enumerate(files.values(), 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {}
        for index, (key, shape) in enumerate(shapes.items()):
            count = shape.numel() if hasattr(shape, "numel") else shape[0] * shape[1]
            tensors[key] = noise.roll(index).repeat(-(-count // noise.numel()))[:count].view(tuple(shape)).clone()
        save_file(tensors, os.path.join(directory, file), {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    index_file = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    Path(directory, "model.safetensors.index.json").write_text(json.dumps(index_file), encoding="utf-8")
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    config.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(directory)


class Bytes:
    """Context: bytes that this process read and wrote, with those that gloo sends, without those it receives."""

    mapped = 0

    def __enter__(self) -> Bytes:
        self.start = self._now()
        return self

    def __exit__(self, *args: object) -> None:
        self.read, self.written = (now - then for now, then in zip(self._now(), self.start, strict=True))

    @classmethod
    def _now(cls) -> tuple[int, int]:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["rchar"]) + cls.mapped, int(lines["wchar"])

    @classmethod
    def count_maps(cls) -> None:
        """From now on slices of memory-mapped weight files count as read."""
        from hf_fsdpturbo.loading.open_files import OpenFiles

        right = OpenFiles.read

        def read(self: OpenFiles, file: str, key: str, index: Any) -> Any:
            part = right(self, file, key, index)
            cls.mapped += part.numel() * part.element_size()
            return part

        OpenFiles.read = read  # type: ignore[method-assign]


def make_trainer(folder: str, model: str = "model") -> Any:
    """The trainer over a release, sharded as it is loaded."""
    from datasets import Dataset

    from hf_fsdpturbo import FSDPTurboSFTConfig, FSDPTurboSFTTrainer

    arguments = FSDPTurboSFTConfig(
        output_dir=f"{folder}/run", max_steps=1, per_device_train_batch_size=1, save_strategy="no", report_to="none",
        ep_size=int(os.environ["WORLD_SIZE"]), use_cpu=True, bf16=False, disable_tqdm=True, max_length=32,
        gradient_checkpointing=False, model_init_kwargs={"dtype": "bfloat16"},
    )  # fmt: skip
    data = Dataset.from_dict({"text": [" ".join(f"w{(7 * i + j) % 512}" for j in range(32)) for i in range(8)]})
    return FSDPTurboSFTTrainer(model=f"{folder}/{model}", args=arguments, train_dataset=data)


def fill_moments(trainer: Any) -> None:
    """State as AdamW has it after a step."""
    import torch

    for number, parameter in enumerate(trainer.model.parameters()):
        moments = [torch.full_like(parameter, (number + 1) * scale) for scale in (1e-4, 1e-6)]
        state = {"step": torch.tensor(1.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        trainer.optimizer.state[parameter] = state


def rank_main(folder: str, phase: str, file_bytes: int) -> None:
    """One rank of one phase: ``write`` or ``resume``; rank 0 prints a line of JSON with all ranks' figures."""
    import torch.distributed as dist

    Bytes.count_maps()
    dist.init_process_group("gloo")
    figures: dict[str, tuple[int, float, int, int]] = {}

    def measure(name: str, operation: Callable[[], Any]) -> Any:
        gc.collect()
        dist.barrier()
        with Bytes() as moved, Peak() as peak:
            result = operation()
        figures[name] = (peak.top, peak.seconds, moved.read, moved.written)
        return result

    make_trainer(folder, "warm")  # imports are not what is measured
    trainer = measure("load" if phase == "write" else "load again", lambda: make_trainer(folder))
    trainer.create_optimizer_and_scheduler(1)
    if phase == "write":
        fill_moments(trainer)
        trainer.hub_file_bytes, trainer.state.global_step = file_bytes, 1
        measure("save checkpoint-1", lambda: trainer._save_checkpoint(trainer.model, None))
        measure("export (save_model)", lambda: trainer.save_model(f"{folder}/hub"))
    else:
        checkpoint = f"{folder}/run/checkpoint-1"
        measure("resume: model", lambda: trainer._load_from_checkpoint(checkpoint))
        measure("resume: optimizer", lambda: trainer._load_optimizer_and_scheduler(checkpoint))
        for number, parameter in enumerate(trainer.model.parameters()):
            moment = trainer.optimizer.state[parameter]["exp_avg"].to_local()
            assert (moment == moment.new_tensor((number + 1) * 1e-4)).all(), "not the moments that were saved"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, figures)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(everyone), flush=True)


def export_main(folder: str, file_bytes: int) -> None:
    """The export command in a process of its own."""
    from hf_fsdpturbo import export

    with Bytes() as moved, Peak() as peak:
        export.export_checkpoint(f"{folder}/run/checkpoint-1", f"{folder}/exported", file_bytes)
    figures = {"hf-fsdpturbo export": (peak.top, peak.seconds, moved.read, moved.written)}
    print("RESULT " + json.dumps([figures]), flush=True)


def equal_files(folder: str) -> bool:
    """Whether both exports hold the released tensors, bit for bit."""
    import torch
    from safetensors import safe_open

    def handles(name: str) -> dict[str, Any]:
        paths = sorted(Path(folder, name).glob("*.safetensors"))
        opened = [safe_open(path, framework="pt") for path in paths]
        return {key: file for file in opened for key in file.keys()}  # noqa: SIM118

    released, rest = handles("model"), [handles("hub"), handles("exported")]
    if any(other.keys() != released.keys() for other in rest):
        return False
    for key, file in released.items():
        whole = file.get_tensor(key)
        if not all(torch.equal(whole, other[key].get_tensor(key)) for other in rest):
            return False
    return True


def report(results: list[list[dict[str, list[float]]]], weights: int) -> bool:
    """Print the table; whether all bytes are within the bound."""
    must = {  # read, written, in sizes of the weights: weights and two moments are three of them
        "load": (1, 0),
        "save checkpoint-1": (0, 3),
        "export (save_model)": (0, 1),
        "load again": (1, 0),
        "resume: model": (1, 0),
        "resume: optimizer": (2, 0),
        "hf-fsdpturbo export": (1, 1),
    }
    print(f"weights {weights / MB:,.0f} MiB in bfloat16, {len(results[0])} ranks")
    print("| operation | peak MiB a rank | seconds | MiB read, all ranks | written | of what must move |")
    print("|---|---|---|---|---|---|")
    within = True
    for ranks in results:
        for name in ranks[0]:
            rows = [rank[name] for rank in ranks]
            read, written = (sum(row[column] for row in rows) for column in (2, 3))
            ratio = (read + written) / (weights * sum(must[name]))
            within = within and ratio <= BOUND
            peak, seconds = max(row[0] for row in rows), max(row[1] for row in rows)
            moved = f"{read / MB:,.0f} | {written / MB:,.0f} | {ratio:.2f}"
            print(f"| {name} | {peak / MB:,.0f} | {seconds:.1f} | {moved} |")
    return within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="qwen3-30b-a3b", choices=SIZES)
    parser.add_argument("--tiny", action="store_true", help="another model of the same kind, of half a megabyte")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--file-mb", type=int, default=1024, help="size of a file of the export")
    parser.add_argument("--folder", help="where the files go, and are removed afterwards")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, size in {"warm": "tiny", "model": "tiny" if options.tiny else options.size}.items():
            os.mkdir(f"{folder}/{name}")
            write_release(f"{folder}/{name}", size, options.layers)
        weights = sum(path.stat().st_size for path in Path(folder, "model").glob("*.safetensors"))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
        limit = str(options.file_mb * MB)
        results = [run(*launch, __file__, "--rank", folder, "write", limit)]
        results.append(run(sys.executable, __file__, "--export", folder, limit))
        equal = equal_files(folder)
        results.append(run(*launch, __file__, "--rank", folder, "resume", limit))
    within = report(results, weights)
    print(f"both exports hold the released weights bit for bit: {equal}")
    return 0 if equal and (within or options.tiny) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1:2] == ["--export"]:
        export_main(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
