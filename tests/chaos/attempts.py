"""An attempt: two ranks train four steps and save each, something happens at a random moment, the folder is judged.

Several attempts that end no process share the life of one spawn, each in a folder of its own.

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
from tests.support.reference_run import Run, build_trainer, forget_accelerate
from tests.support.spawn import RankError, run_ranks
from tests.support.tiny_models import save_tiny, texts

STEPS = 4
ARGS = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 1}
SECONDS = 120  # of one run, on a busy machine
EACH = 20  # of each further one in the same spawn
PAUSE = 0.1
WHO = ("first", "second")


@dataclass(frozen=True)
class Blow:
    """What happens to a rank's process: a signal so many seconds after training or a step began; None: nothing."""

    signal: int | None = None
    delay: float = 0.0
    ranks: tuple[int, ...] = ()
    async_save: bool = False
    pause: float = 0.0  # seconds in each step
    step: int = 0  # the last one that had ended when it began; 0: training began
    apart: float = 0.0  # seconds that rank 1 is later


Job = tuple[Run, str, bool, Blow]
"""Of one attempt: what is trained, into which folder, whether it resumes there, what happens."""


def make_runs(folder: Path) -> dict[str, Run]:
    """Two runs of one model that train on other texts."""
    model = save_tiny("qwen3_moe", folder / "model")
    run = Run(model=model, data={"text": texts(16)}, args=ARGS, turbo={"ep_size": 2}, gradients=False)
    return {"first": run, "second": replace(run, data={"text": texts(16, seed=9)})}


def train_all(jobs: list[Job]) -> list[dict[str, Any]]:
    """Rank function: one job after another."""
    return [train(*job) for job in jobs]


def train(run: Run, output_dir: str, resume: bool, blow: Blow) -> dict[str, Any]:
    """Rank function: steps at which a save had ended, in a file too; the seconds that training took."""
    from transformers import TrainerCallback

    from hf_fsdpturbo import watcher

    forget_accelerate()
    watcher.POLL = 0.05
    rank, started, timers = int(os.environ["RANK"]), time.monotonic(), []

    class Notes(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            nonlocal started
            started = time.monotonic()
            self.strike(state.global_step)

        def strike(self, step):
            if blow.signal is not None and rank in blow.ranks and step == blow.step and not timers:
                delay = blow.delay + blow.apart * rank
                timers.append(threading.Timer(delay, os.kill, (os.getpid(), blow.signal)))
                timers[0].start()

        def on_step_begin(self, args, state, control, **kwargs):
            self.strike(state.global_step)
            time.sleep(blow.pause)

        def on_train_end(self, args, state, control, **kwargs):
            for timer in timers:
                timer.cancel()
                timer.join()  # one that has begun to strike does so while the handler is ours

        def on_save(self, args, state, control, **kwargs):
            if rank == 0:
                with open(f"{output_dir}.saved", "a", encoding="utf-8") as file:
                    print(state.global_step, file=file)

    trainer = build_trainer(run, turbo=True, output_dir=output_dir)
    trainer.async_save = blow.async_save
    trainer.callback_handler.callbacks.insert(0, Notes())  # before what puts the handler of SIGTERM back
    trainer.train(resume_from_checkpoint=resume or None)
    return {"step": trainer.state.global_step, "seconds": time.monotonic() - started}


def meet_all(run: Run, who: str, jobs: list[tuple[str, float]]) -> list[str]:
    """Rank function of one of two runs: both come to each folder, wait, and train after their delays."""
    words = []
    for output_dir, delay in jobs:
        Path(f"{output_dir}.{who}{os.environ['RANK']}").touch()
        others = [Path(f"{output_dir}.{each}{rank}") for each in WHO for rank in range(2)]
        while not all(other.exists() for other in others):
            time.sleep(0.005)
        time.sleep(delay)
        try:
            train(run, output_dir, False, Blow())
            words.append("went on")
        except ValueError as error:
            if "is written by another run" not in str(error):
                raise
            words.append("refused")
    return words


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
        jobs: list[Job] = [(run, str(folder / name), False, Blow()) for name, run in self.runs.items()]
        self.seconds = max(each["seconds"] for each in run_ranks(train_all, 2, jobs, timeout=2 * SECONDS)[0])
        for name in self.runs:
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

    def _resume(self, found_in: dict[Path, dict[int, Path]]) -> None:
        """Each folder's run goes on from its newest checkpoint (``found_in``: by step) to the same end."""
        # from the last step Trainer would take one beyond it
        places = [place for place, found in found_in.items() if found and max(found) < STEPS]
        if not places:
            return
        jobs = [(self.runs["first"], str(place), True, Blow()) for place in places]
        results = run_ranks(train_all, 2, jobs, timeout=SECONDS + EACH * len(jobs))[0]
        assert [result["step"] for result in results] == [STEPS] * len(jobs), results
        for place in places:
            assert digest(finished(place)[STEPS]) == self.right["first"][STEPS], "resumed as another run"

    def killed(self) -> list[str]:
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
        self._resume({place: found})
        if word == "killed":
            word += ", resumed" if found else ", before the first save"
        return [word]

    def signalled(self, attempts: int = 1, resumed: int = 1) -> list[str]:
        """SIGTERM on one rank or both: they agree on a step, save it and end without an error.

        Args:
            attempts: in the life of one spawn.
            resumed: how many of those that stopped early go on.
        """
        run = replace(self.runs["first"], args={**ARGS, "save_steps": STEPS, "enable_jit_checkpoint": True})
        jobs: list[Job] = []
        for _ in range(attempts):
            ranks = self.draw.choice([(0,), (1,), (0, 1)])
            step, delay, apart = self.draw.randrange(STEPS), self.draw.uniform(0, 2 * PAUSE), self.draw.random() / 10
            blow = Blow(signal.SIGTERM, delay, ranks, pause=PAUSE, step=step, apart=apart)
            jobs.append((run, str(self._place()), False, blow))
        words, stopped = [], {}
        for job, *results in zip(
            jobs, *run_ranks(train_all, 2, jobs, timeout=SECONDS + EACH * len(jobs)), strict=True
        ):
            assert results[0]["step"] == results[1]["step"], (job, results)
            found = self._judge(Path(job[1]))
            assert max(found, default=0) == results[0]["step"], (job, found, results)
            if results[0]["step"] < STEPS:
                stopped[Path(job[1])] = found
            words.append("saved and stopped" if results[0]["step"] < STEPS else "in or after the last step")
        self._resume(dict(list(stopped.items())[:resumed]))
        return words

    def twice(self, attempts: int = 1) -> list[str]:
        """Two runs, on other texts, are started into the same folder, each after a delay of its own.

        Args:
            attempts: in the life of the same two spawns.
        """
        places = [self._place() for _ in range(attempts)]
        delays = {who: [self.draw.choice([0.0, self._moment()]) for _ in places] for who in WHO}

        def start(who: str) -> list[list[str]]:
            jobs = list(zip(map(str, places), delays[who], strict=True))
            return run_ranks(meet_all, 2, self.runs[who], who, jobs, timeout=SECONDS + EACH * len(jobs))

        with ThreadPoolExecutor(len(WHO)) as pool:
            outcomes = dict(zip(WHO, pool.map(start, WHO), strict=True))
        words = []
        for number, place in enumerate(places):
            seen = {who: [rank[number] for rank in outcomes[who]] for who in WHO}
            assert all(len(set(ranks)) == 1 for ranks in seen.values()), seen
            words.append(", ".join(f"{who} {ranks[0]}" for who, ranks in seen.items()))
            assert "went on" in words[-1], seen
            assert list(self._judge(place)) == list(range(1, STEPS + 1))
        return words
