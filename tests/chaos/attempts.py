"""One attempt: two ranks train four steps and save each, something happens at a random moment, the folder is judged.

What a checkpoint holds is read with torch's own reader and compared by hash with what an undisturbed run holds at that
step: a checkpoint that was lost, mixed from two runs or cut short is seen whoever wrote its marks.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_fsdpturbo.checkpoint import commit, intact
from tests.support.reference_run import Run, build_trainer
from tests.support.spawn import RankError, run_ranks
from tests.support.tiny_models import save_tiny, texts

STEPS = 4
ARGS = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 1}
SECONDS = 120  # of one run, on a busy machine


@dataclass(frozen=True)
class Blow:
    """What happens to this rank's process: a signal so many seconds after training began; None: nothing."""

    signal: int | None = None
    delay: float = 0.0
    ranks: tuple[int, ...] = ()
    async_save: bool = False


def make_runs(folder: Path) -> dict[str, Run]:
    """Two runs of one model that train on other texts."""
    model = save_tiny("qwen3_moe", folder / "model")
    run = Run(model=model, data={"text": texts(16)}, args=ARGS, turbo={"ep_size": 2}, gradients=False)
    return {"first": run, "second": replace(run, data={"text": texts(16, seed=9)})}


def train(run: Run, output_dir: str, resume: bool, blow: Blow) -> dict[str, Any]:
    """Rank function: steps at which a save had ended, in a file too; the seconds that training took."""
    from transformers import TrainerCallback

    rank, started, timers = int(os.environ["RANK"]), time.monotonic(), []

    class Notes(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            nonlocal started
            started = time.monotonic()
            if blow.signal is not None and rank in blow.ranks:
                timers.append(threading.Timer(blow.delay, os.kill, (os.getpid(), blow.signal)))
                timers[0].start()

        def on_save(self, args, state, control, **kwargs):
            if rank == 0:
                with open(f"{output_dir}.saved", "a", encoding="utf-8") as file:
                    print(state.global_step, file=file)

    trainer = build_trainer(run, turbo=True, output_dir=output_dir)
    trainer.async_save = blow.async_save
    trainer.add_callback(Notes())
    trainer.train(resume_from_checkpoint=resume or None)
    for timer in timers:
        timer.cancel()
    return {"step": trainer.state.global_step, "seconds": time.monotonic() - started}


def digest(checkpoint: Path) -> str:
    """Hash of all that a checkpoint's shards hold, read with torch's own reader."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    reader = dcp.FileSystemReader(checkpoint / "dcp")
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    found = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{name}.{key}", value[key])
        else:
            assert isinstance(value, torch.Tensor), name
            found.update(name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    add("", state)
    return found.hexdigest()


def finished(run_dir: Path) -> dict[int, Path]:
    """Checkpoints with a mark, by step; what is marked must be whole.

    Raises:
        ValueError: one is not.
    """
    found = {step: Path(path) for step, path in commit.checkpoints(str(run_dir)) if commit.is_finished(path)}
    for path in found.values():
        intact.check(str(path))
    return found


class Chaos:
    """Attempts over one model.

    Args:
        folder: for all of them.
        seed: of every random moment.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw, self.number = folder, random.Random(seed), 0
        self.runs = make_runs(folder)
        self.right: dict[str, dict[int, str]] = {}
        self.seconds = 0.0
        for name, run in self.runs.items():
            result = run_ranks(train, 2, run, str(folder / name), False, Blow(), timeout=SECONDS)
            self.seconds = max(self.seconds, result[0]["seconds"])
            self.right[name] = {step: digest(path) for step, path in finished(folder / name).items()}
            assert list(self.right[name]) == list(range(1, STEPS + 1))

    def _place(self) -> Path:
        self.number += 1
        return self.folder / f"run{self.number}"

    def _moment(self) -> float:
        return self.draw.uniform(0, 1.1 * self.seconds)

    def _judge(self, place: Path, late: int = 0) -> dict[int, Path]:
        """Checkpoints of the folder: each is one of an undisturbed run's, and what was said to be saved is there.

        ``late``: saves that may still be in the background when they are said to be saved.
        """
        found = finished(place)
        for step, path in found.items():
            assert digest(path) in {each[step] for each in self.right.values()}, f"{path} is no run's"
        notes = Path(f"{place}.saved")
        saved = [int(line) for line in notes.read_text().split()] if notes.exists() else []
        lost = set(saved[: len(saved) - late]) - found.keys()
        assert not lost, f"checkpoints {sorted(lost)} were saved and are gone"
        return found

    def _resume(self, place: Path, found: dict[int, Path]) -> None:
        if not found:
            return
        result = run_ranks(train, 2, self.runs["first"], str(place), True, Blow(), timeout=SECONDS)
        assert result[0]["step"] == STEPS, result
        if max(found) < STEPS:
            assert digest(finished(place)[STEPS]) == self.right["first"][STEPS], "resumed as another run"

    def killed(self) -> str:
        """One rank or both, by a signal that no process sees."""
        ranks = self.draw.choice([(0,), (1,), (0, 1)])
        blow = Blow(signal.SIGKILL, self._moment(), ranks, async_save=self.draw.random() < 0.5)
        place = self._place()
        try:
            run_ranks(train, 2, self.runs["first"], str(place), False, blow, timeout=SECONDS)
            word = "ended before it"
        except RankError as error:
            if error.kind == "Timeout":
                raise
            word = "killed"
        found = self._judge(place, late=int(blow.async_save))
        self._resume(place, found)
        return f"{word}, {'resumed' if found else 'before the first save'}"

    def signalled(self) -> str:
        """SIGTERM on one rank or both: they agree on a step, save it and end without an error."""
        ranks = self.draw.choice([(0,), (1,), (0, 1)])
        run = replace(self.runs["first"], args={**ARGS, "save_steps": STEPS, "enable_jit_checkpoint": True})
        place, blow = self._place(), Blow(signal.SIGTERM, self._moment(), ranks)
        results = run_ranks(train, 2, run, str(place), False, blow, timeout=SECONDS)
        assert results[0]["step"] == results[1]["step"], results
        found = self._judge(place)
        stopped = results[0]["step"] < STEPS
        assert max(found, default=0) == results[0]["step"], (found, results)
        self._resume(place, found)
        return "saved and resumed" if stopped else "ended before it"

    def twice(self) -> str:
        """A second run, on other texts, is started into the same folder while the first one trains."""
        place, wait = self._place(), self._moment()

        def later() -> str:
            time.sleep(wait)
            try:
                run_ranks(train, 2, self.runs["second"], str(place), False, Blow(), timeout=SECONDS)
            except RankError as error:
                if "is written by another run" not in error.text:
                    raise
                return "refused"
            return "went on"

        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(later)
            first = "went on"
            try:
                run_ranks(train, 2, self.runs["first"], str(place), False, Blow(), timeout=SECONDS)
            except RankError as error:
                if "is written by another run" not in error.text:
                    raise
                first = "refused"
            word = f"first {first}, second {second.result()}"
        assert word != "first refused, second refused"
        assert list(self._judge(place)) == list(range(1, STEPS + 1))
        return word
