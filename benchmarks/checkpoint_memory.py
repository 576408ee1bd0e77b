"""Peak extra host memory of saving, resuming and exporting, against the size of the model.

    python benchmarks/checkpoint_memory.py [--ranks 4] [--layers 8]

A Qwen3-MoE of some hundred MB is trained one step over gloo on CPU ranks; then every rank measures the growth of its
anonymous memory (not the page cache) during each operation. The gathered save that Transformers would do is measured
beside ours, in the same processes. Times are printed too, but on shared cores they say little.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MB = 2**20


class Peak:
    """Context: largest growth of this process's anonymous memory, in bytes, and seconds."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.start, self.top, self.begin = anonymous(), 0, time.monotonic()
        self.running = True
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while self.running:
            self.top = max(self.top, anonymous() - self.start)
            time.sleep(0.002)

    def __exit__(self, *args: object) -> None:
        self.running = False
        self.thread.join()
        self.seconds = time.monotonic() - self.begin


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def make_model(directory: str, layers: int) -> int:
    """Write a model; returns its bytes."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=8192, hidden_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, num_experts=32, num_experts_per_tok=2, moe_intermediate_size=256, intermediate_size=512,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8192)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(directory)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def rank_main(folder: str, file_bytes: int) -> None:
    """One rank: all operations in turn; rank 0 prints one JSON line with every rank's peaks."""
    import torch.distributed as dist
    from datasets import Dataset
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from hf_fsdpturbo import FSDPTurboSFTConfig, FSDPTurboSFTTrainer

    data = Dataset.from_dict({"text": [" ".join(f"w{(7 * i + j) % 8192}" for j in range(32)) for i in range(64)]})

    def trainer() -> FSDPTurboSFTTrainer:
        arguments = FSDPTurboSFTConfig(
            output_dir=f"{folder}/run", max_steps=1, per_device_train_batch_size=1, save_strategy="no", ep_size=2,
            report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1, max_length=32,
            gradient_checkpointing=False,
        )  # fmt: skip
        return FSDPTurboSFTTrainer(model=f"{folder}/model", args=arguments, train_dataset=data)

    peaks: dict[str, tuple[int, float]] = {}

    def measure(name: str, operation) -> None:
        dist.barrier()
        with Peak() as peak:
            operation()
        peaks[name] = (peak.top, peak.seconds)

    one = trainer()
    one.train()
    one.hub_file_bytes = file_bytes
    measure("export, gather-free", lambda: one.save_model(f"{folder}/hub"))
    measure("checkpoint (DCP)", lambda: one._save_checkpoint(one.model, None))

    def gathered() -> None:
        state = get_model_state_dict(one.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            one._save(f"{folder}/gathered", state_dict=state)

    measure("export, gathered (for comparison)", gathered)
    checkpoint = f"{folder}/run/checkpoint-1"
    measure("resume: model", lambda: one._load_from_checkpoint(checkpoint))
    measure("resume: optimizer", lambda: one._load_optimizer_and_scheduler(checkpoint))
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, peaks)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(everyone), flush=True)


def export_main(checkpoint: str, out: str, file_bytes: int) -> None:
    """The export command in a process of its own."""
    from hf_fsdpturbo import export

    with Peak() as peak:
        export.export_checkpoint(checkpoint, out, file_bytes)
    print("RESULT " + json.dumps([{"hf-fsdpturbo export (one process)": (peak.top, peak.seconds)}]), flush=True)


def run(*command: str) -> list[dict[str, list[float]]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(lines[0].removeprefix("RESULT "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--file-mb", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = make_model(f"{folder}/model", arguments.layers)
        file_bytes = arguments.file_mb * MB
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.ranks}"]
        ranks = run(*launch, __file__, "--rank", folder, str(file_bytes))
        checkpoint = f"{folder}/run/checkpoint-1"
        alone = run(sys.executable, __file__, "--export", checkpoint, f"{folder}/out", str(file_bytes))
    print(f"model {size / MB:.0f} MB in float32, {arguments.ranks} ranks, files of {arguments.file_mb} MB, ep_size 2")
    print(f"{'operation':38} {'peak extra MB a rank':>24} {'worst / model':>14} {'seconds':>8}")
    for results in (ranks, alone):
        for name in results[0]:
            tops = [result[name][0] / MB for result in results]
            text = " ".join(f"{top:.0f}" for top in tops)
            print(f"{name:38} {text:>24} {max(tops) * MB / size:14.2f} {max(r[name][1] for r in results):8.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["--export"]:
        export_main(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
