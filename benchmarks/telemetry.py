"""What telemetry costs a step: one training run in which it is on and off by turns, blocks of steps side by side.

The model and data are those of `train_throughput.py` (Qwen3-30B-A3B's shape, fewer layers), every step a logging step
unless `--logging` says otherwise. In one process:

    python -m benchmarks.telemetry --make --layers 8 --checkpoint ckpt
    python -m benchmarks.telemetry --layers 8 --checkpoint ckpt --ep 1

On two GPUs, where exchanges are timed too: `torchrun --nproc_per_node 2 -m benchmarks.telemetry ... --ep 2`. `--tiny`
rehearses on CPU. It prints milliseconds a step of each block, the medians, and what the difference is of a step.
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch
from transformers.trainer_callback import TrainerCallback

from benchmarks import train_throughput


class Turns(TrainerCallback):
    """Switches telemetry at the borders of blocks; the device has no work left when a clock is read."""

    def __init__(self, steps: int, warmup: int) -> None:
        self.steps, self.warmup, self.trainer = steps, warmup, None
        self.ms: dict[bool, list[float]] = {True: [], False: []}
        self.is_on, self.begun, self.line = True, None, {}

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        done = state.global_step - self.warmup
        if done < 0 or done % self.steps:
            return
        if self.begun is not None:
            self.ms[self.is_on].append((self.now() - self.begun) / self.steps * 1e3)
        self.is_on = done // self.steps % 2 == 0
        telemetry = self.trainer._telemetry
        telemetry._detach()
        if self.is_on:
            telemetry.on_train_begin(args, state, control)
        self.begun = self.now()

    def on_log(self, args, state, control, logs=None, **kwargs):
        begins = (state.global_step - self.warmup) % self.steps == 1  # a window without its first batch
        if "tokens_per_second" in logs and not begins:
            self.line = {name: value for name, value in logs.items() if isinstance(value, float)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False)
    parser.add_argument("--block", type=int, default=10, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=5, help="blocks of each kind")
    parser.add_argument("--logging", type=int, default=1, help="steps of a logging window")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    a = train_throughput.arguments()
    config = train_throughput.model_config(a)
    if a.make:
        return train_throughput.make_checkpoint(a, config)
    a.steps = a.warmup + 2 * own.blocks * own.block + 1
    os.environ["FSDPTURBO_FSDPTURBO_METRICS"] = "true"
    turns = Turns(own.block, a.warmup)
    trainer = train_throughput.make_trainer(a, config, turns, int(os.environ.get("WORLD_SIZE", 1)))
    trainer.args.logging_steps = trainer.state.logging_steps = own.logging
    turns.trainer = trainer
    trainer.train()
    if int(os.environ.get("RANK", 0)) == 0:
        on, off = (statistics.median(turns.ms[is_on]) for is_on in (True, False))
        pairs = [100 * (x / y - 1) for x, y in zip(turns.ms[True], turns.ms[False], strict=False)]
        result = {
            "layers": config.num_hidden_layers, "logging_steps": own.logging, "world": trainer.args.world_size,
            "on_ms": round(on, 2), "off_ms": round(off, 2), "cost_percent": round(100 * (on / off - 1), 2),
            "pairs_percent": [round(pair, 2) for pair in pairs],
            "blocks": {str(is_on): [round(ms, 2) for ms in times] for is_on, times in turns.ms.items()},
            "a_line": turns.line,
        }  # fmt: skip
        print("RESULT " + json.dumps(result), flush=True)
        if a.out:
            with open(a.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
