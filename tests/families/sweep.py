"""Many families one after another in the same ranks; a family that takes them down does not end the sweep.

    jobs (family x check)  ->  ranks run them in order, rank 0 notes each start and verdict in a file
      all ranks raise the same ValueError   a refusal: noted, the ranks go on
      anything else                         the ranks end; the job that ran is a crash, a new spawn takes the rest
      nothing for ``limit`` seconds         the ranks write their stacks and end: the same
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.families.checks import CHECKS, CRASH, NEARNESS, REFUSED, Verdict
from tests.families.listing import Family
from tests.families.nearness import NO_CHOICE, prepare_nearness
from tests.families.plain import load_plain, prepare, release
from tests.support.spawn import RankError, init_gloo, run_plain, run_ranks

LIMIT = 90.0  # seconds for one job: a busy machine, not a slow family
PREPARE = "prepare"


@dataclass(frozen=True)
class Job:
    """One question about one family."""

    family: Family
    check: str


Note = dict[str, Any]


def preparations(families: Iterable[Family], checks: Iterable[str]) -> list[Job]:
    """What one plain process does before ranks are asked: family by family, and no more than the checks need."""
    further = dict.fromkeys(CHECKS[check].after for check in checks)
    return [Job(family, each) for family in families for each in (PREPARE, *further) if each is not None]


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def run_jobs(jobs: list[Job], folder: str, notes: str) -> None:
    """Rank function (and the plain process's): do every job; rank 0 appends its verdict to the file ``notes``."""
    if "RANK" in os.environ:
        init_gloo(timeout=LIMIT)
    with open(notes, "a", encoding="utf-8") if _rank() == 0 else open(os.devnull, "w") as file:
        for job in jobs:
            _note(file, job, state="start")
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
            started = time.monotonic()
            done = _do(job, Path(folder) / job.family.name)
            faulthandler.cancel_dump_traceback_later()
            _note(file, job, state="done", seconds=round(time.monotonic() - started, 2), **done)


def _note(file: Any, job: Job, **what: Any) -> None:
    file.write(json.dumps({"family": job.family.name, "check": job.check, **what}) + "\n")
    file.flush()


def _do(job: Job, folder: Path) -> Note:
    if job.check == PREPARE:
        return {"facts": prepare(job.family, folder)}
    if job.check == NEARNESS:
        if job.family.name in NO_CHOICE:
            return {"facts": {}}
        return {"facts": prepare_nearness(lambda dtype: load_plain(job.family, release(folder), dtype), folder)}
    check = CHECKS[job.check]
    refusal: str | None = None
    verdict: Verdict | None = None
    try:
        verdict = check.ask(job.family, folder, check.layout)
    except ValueError as error:
        if not _ours(error):
            raise
        refusal = str(error)
    _same_everywhere(refusal)
    return {"verdict": asdict(verdict or _refused(str(refusal)))}


BLAMES = ("failed on rank", "Use the model's own checkpoint")
"""What the package says where it ran into an error that it did not foresee, or takes a good release for a bad one."""


def _refused(message: str) -> Verdict:
    return Verdict(CRASH if any(words in message for words in BLAMES) else REFUSED, message)


def _ours(error: BaseException) -> bool:
    """Whether the package raised it: a refusal by name, and not an accident below it."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("/hf_fsdpturbo/" in frame.filename for frame in frames[-1:])


def _same_everywhere(refusal: str | None) -> None:
    """All ranks must refuse, or none: a rank that raises alone leaves the others waiting."""
    import torch.distributed as dist

    refusals: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal is not None)
    if len(set(refusals)) != 1:
        raise RuntimeError(f"ranks {[r for r, raised in enumerate(refusals) if raised]} alone refused: {refusal}")


def carry_out(
    jobs: list[Job], world: int, folder: Path, *, limit: float, report: Callable[[Note], None]
) -> None:
    """Do the jobs on ``world`` ranks (1: a plain process) in as many spawns as it takes.

    Args:
        jobs: in order.
        world: number of ranks.
        folder: where families' files lie and logs go.
        limit: seconds for a spawn.
        report: called with the notes of each spawn, in the order of the jobs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left = list(jobs)
    number = 0
    while left:
        number += 1
        notes = folder / f"notes_{world}_{os.getpid()}_{number}.jsonl"
        notes.unlink(missing_ok=True)
        failure = _spawn(left, world, folder, notes, limit)
        lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
        finished = [line for line in lines if line["state"] == "done"]
        left_before, left = left, left[len(finished) :]
        if failure is not None and left:
            finished.append(_crash(left[0], failure, folder))
            left = left[1:]
        if len(left) == len(left_before):
            raise RuntimeError(f"No job of {left[0].family.name} was begun.\n{failure}")
        for line in finished:
            report(_without_paths(line, folder))


def _without_paths(note: Note, folder: Path) -> Note:
    """The record is read elsewhere: file names stay, the folder goes."""
    return json.loads(json.dumps(note).replace(f"{folder}/", ""))


def _spawn(jobs: list[Job], world: int, folder: Path, notes: Path, limit: float) -> RankError | None:
    try:
        if world == 1:
            run_plain(run_jobs, jobs, str(folder), str(notes), timeout=limit)
        else:
            run_ranks(run_jobs, world, jobs, str(folder), str(notes), timeout=limit)
    except RankError as error:
        return error
    return None


def _crash(job: Job, failure: RankError, folder: Path) -> Note:
    """A note for the job that took the ranks down; the whole report goes to a file beside the family's."""
    logs = folder / job.family.name
    logs.mkdir(parents=True, exist_ok=True)
    (logs / f"{job.check}.log").write_text(str(failure), encoding="utf-8")
    text = failure.text.strip().splitlines()[0] if failure.text.strip() else ""
    detail = f"{failure.kind}: {text}"[:300]
    if job.check == PREPARE:
        return {"family": job.family.name, "check": job.check, "state": "done", "failed": detail}
    if job.check == NEARNESS:  # its check will miss the file, and crash by itself
        return {"family": job.family.name, "check": job.check, "state": "done", "facts": {}}
    return {"family": job.family.name, "check": job.check, "state": "done", "verdict": asdict(Verdict(CRASH, detail))}
