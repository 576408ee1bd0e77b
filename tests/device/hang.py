"""A stopped rank under torchrun, on two GPUs over NCCL: `python -m tests.device.hang`; ``--cpu`` rehearses over gloo.

Prints what the launcher reports and what the waiting rank wrote; the exit status says whether the stopped rank was
named, the collective of the other found, and the launcher told. About 90 s: torchrun leaves a stopped process 30 s.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 10


def train(folder: Path, cpu: bool) -> None:
    """One rank's; rank 1 stops in its third step."""
    from datasets import Dataset
    from transformers import TrainerCallback

    import hf_fsdpturbo
    from tests.support.tiny_models import texts

    class Stops(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGSTOP)

    config = hf_fsdpturbo.FSDPTurboSFTConfig(
        output_dir=str(folder / "out"),
        max_steps=5,
        use_cpu=cpu,
        bf16=False,
        report_to="none",
        save_strategy="no",
        max_length=48,
        per_device_train_batch_size=2,
        ep_size=2,
        hang_timeout=TIMEOUT,
    )
    data = Dataset.from_dict({"text": texts(64)})
    hf_fsdpturbo.FSDPTurboSFTTrainer(str(folder / "model"), config, train_dataset=data, callbacks=[Stops()]).train()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.folder is not None:
        train(options.folder, options.cpu)
        return 0
    from tests.support.tiny_models import save_tiny

    with tempfile.TemporaryDirectory(prefix="hang_") as made:
        folder = Path(made)
        save_tiny("qwen3_moe", folder / "model")
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "tests.device.hang"]
        more = {"OMP_NUM_THREADS": "1", **({"ACCELERATE_USE_CPU": "true"} if options.cpu else {})}
        command = [*launch, "--folder", str(folder), *(["--cpu"] if options.cpu else [])]
        ran = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True, timeout=300, check=False
        )
        files = {path.name: path.read_text() for path in sorted((folder / "out" / "hang").glob("rank_*.txt"))}
    print(ran.stderr[-6000:])
    waiting = files.get("rank_0.txt", "")
    print(waiting[:6000])
    checks = {
        "the run failed": ran.returncode != 0,
        "the error names the stopped rank": "rank 1 gives no sign" in ran.stderr,
        "the launcher reports it": "HangError: No step for" in ran.stderr,
        "the other waits in a collective": "The main thread waits in" in waiting,
        "its stack is there": "training_step" in waiting,
        "the stopped one has a file": "gave no sign" in files.get("rank_1.txt", ""),
    }
    if not options.cpu:
        checks["NCCL's flight recorder has what has not ended"] = "collectives that have not ended" in waiting
    for what, holds in checks.items():
        print(f"{'yes' if holds else 'NO '}  {what}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
