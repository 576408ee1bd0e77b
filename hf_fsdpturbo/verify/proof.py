"""The order of a proof: the small model, ranks, one plain process on their micro-batches, another layout, verdicts.

ranks  train (saves a checkpoint and the model) | recompute | packing | bf16
plain  the same micro-batches | once more half an ulp away | what was saved, read back
ranks  resume: the checkpoint at another layout
"""

from __future__ import annotations

import functools
import gc
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_fsdpturbo.verify import verdicts
from hf_fsdpturbo.verify.faults import FAULTS, check_fault
from hf_fsdpturbo.verify.few_ranks import Layout, another
from hf_fsdpturbo.verify.jobs import plain_job, rank_job
from hf_fsdpturbo.verify.processes import ProcessFailed, device_count, launch
from hf_fsdpturbo.verify.recording import Batch, Record, merge_batches
from hf_fsdpturbo.verify.runs import CLIP, SAVED_AT, Run, checkpoint, read_back, read_plainly, runs, unpacked
from hf_fsdpturbo.verify.small_model import SmallModel, save_small, small_config
from hf_fsdpturbo.verify.to_prove import Asked
from hf_fsdpturbo.verify.users_config import read_config
from hf_fsdpturbo.verify.verdicts import DIFFERS, NOT_RUN, Verdict

MODEL_ROWS = ("loaded", "loss", "gradients", "norm", "weights")


class Proof:
    """One proof: processes, records by run, rows.

    Args:
        asked: what is to be proven.
        devices: accelerators that ranks share; 0 for CPU.
        tell: called with a line where a run begins, for people who wait.
    """

    def __init__(self, asked: Asked, devices: int, tell: Callable[[str], None]) -> None:
        self.asked, self.devices, self.cpu, self.tell = asked, devices, not devices, tell
        self.folder = asked.folder or Path(tempfile.mkdtemp(prefix="verify_"))
        self.runs = runs(asked)
        self.small: SmallModel
        self.rows: list[Verdict] = []
        self.logs: list[str] = []
        self._ours: dict[str, list[Record]] = {}
        self._plain: list[Record] = []
        self._launches = 0

    def prepare(self) -> SmallModel:
        """Make the small model.

        Raises:
            ValueError: MODEL, or the fault, does not go with it.
        """
        asked = self.asked
        try:
            whole = read_config(asked.values, asked.model)
            config = small_config(whole, asked.layout.ep, asked.layout.cp)
            self.small = save_small(config, whole, self.folder / "model", command=asked.command)
            if asked.fault is not None:
                check_fault(asked.fault, self.small, asked.training, self.runs)
        except ValueError:
            self._clear()
            raise
        read_plainly(self.small, self.small.folder)  # also what ranks would each build: tables of conversions
        gc.collect()
        gc.freeze()  # else the first collection of each rank visits, and so copies, everything that is here
        return self.small

    def routing(self) -> str:
        """How mixed the routing of the plain run was."""
        return verdicts.reached(self._plain[0] if self._plain else Record(), self.small.experts)

    def prove(self) -> list[Verdict]:
        """All runs (with a fault the one that it belongs to); one that fails is a red row, and the others go on."""
        try:
            self._train()
            for name in self._wanted():
                self._resume() if name == "resume" else self._once_more(name)
        finally:
            self._clear()
        return self.rows

    def _clear(self) -> None:
        if self.asked.folder is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _wanted(self) -> list[str]:
        """Runs after the first: all, and with a fault only the one that it belongs to."""
        others = [name for name in ("recompute", "packing", "bf16", "resume") if name in self.runs]
        return [name for name in others if self.asked.fault is None or FAULTS[self.asked.fault].run == name]

    def _launch(self, works: list[Callable[[], Any]], *, alone: bool) -> list[Any]:
        self._launches += 1
        place, fresh = self.folder / f"launch{self._launches}", self.asked.fresh or not self.cpu
        return launch(works, place, self.asked.seconds, devices=self.devices, alone=alone, fresh=fresh)

    def _ranks(self, name: str, layout: Layout, resume: str | None = None, saved: str | None = None) -> list[Record]:
        """Records of our ranks, by rank."""
        self.tell(f"{name}: {layout.world} rank(s), {layout.name}")
        run, folder = self.runs[name], self.folder / f"run_{name}"
        work = functools.partial(rank_job, self.asked, self.small, run, folder, layout, self.cpu, resume, saved)
        return self._launch([work] * layout.world, alone=layout.world == 1)

    def _alone(self, jobs: list[Callable[[], Record]], what: str) -> list[Record]:
        """Jobs of plain processes side by side."""
        self.tell(f"{what}: {len(jobs)} plain process(es)")
        return self._launch(jobs, alone=True)

    def _reference(self, run: Run, batches: list[Batch] | None, moved: bool = False) -> Callable[[], Record]:
        folder = self.folder / f"plain_{run.name}_{moved}"
        return functools.partial(plain_job, self.asked, self.small, run, folder, batches, self.cpu, moved)

    def _batches(self, name: str) -> list[Batch]:
        return merge_batches(self._ours[name][:: self.asked.layout.cp])

    def _failed(self, rows: tuple[str, ...], error: ProcessFailed) -> None:
        """The first row says what happened, the others that they could not be seen."""
        self.logs.append(error.log)
        self.rows.append(Verdict(rows[0], DIFFERS, detail=str(error)))
        self.rows += [Verdict(row, NOT_RUN, detail=f"see {rows[0]}") for row in rows[1:]]

    def _blamed(self, error: ProcessFailed) -> ProcessFailed:
        """The same failure; it says so where TRL's own trainer fails on this model too."""
        if self.asked.fault is not None or "train" in self._ours:
            return error
        try:
            self._alone([self._reference(self.runs["train"], None)], "plain alone")
        except ProcessFailed as plain:
            return ProcessFailed(f"{error}. TRL's trainer without us fails too: {plain}", error.log)
        return error

    def _train(self) -> None:
        saved = str(self.folder / "saved")
        try:
            self._ours["train"] = self._ranks("train", self.asked.layout, saved=saved)
            batches = self._batches("train")
            run = self.runs["train"]
            jobs = [self._reference(run, batches), self._reference(run, batches, moved=True)]
            self._plain = self._alone(jobs, "train")
        except ProcessFailed as error:
            rows = ("loss", *(row for row in MODEL_ROWS if row != "loss"), "saved file")
            return self._failed(rows, self._blamed(error))
        plain, moved = self._plain
        ours = self._ours["train"][0]
        self.rows.append(verdicts.loaded(ours, plain))
        self.rows += verdicts.trained(ours, plain, moved, CLIP)
        try:
            job = functools.partial(read_back, self.asked, self.small, saved, batches[0], self.cpu)
            (read,) = self._alone([job], "read back")
            self.rows.append(verdicts.saved_file(read, plain, moved))
        except ProcessFailed as error:
            self._failed(("saved file",), error)

    def _once_more(self, name: str) -> None:
        """Recompute (against the plain run that is there), packing and bf16 (against a plain run of their own)."""
        row = "bf16 loss" if name == "bf16" else name
        if not self._plain:
            self.rows.append(Verdict(row, NOT_RUN, detail="see loss"))
            return
        try:
            self._ours[name] = self._ranks(name, self.asked.layout)
            ours = self._ours[name][0]
            if name == "recompute":
                if not verdicts.same_batches(ours, self._ours["train"][0]):
                    raise ProcessFailed("it saw other micro-batches than the run without recompute", "")
                plain, moved = self._plain
                self.rows.append(verdicts.gradients(row, ours, plain, moved, CLIP))
                return
            plain, *others = self._references(name)
        except ProcessFailed as error:
            return self._failed((row,), error)
        if name == "bf16":
            self.rows.append(verdicts.bf16(ours, plain))
        else:
            parts = list(verdicts.trained(ours, plain, others[0], CLIP))
            self.rows.append(verdicts.together(row, parts))

    def _references(self, name: str) -> list[Record]:
        """Plain runs on the micro-batches of ``name``; packed documents stand one a row there.

        Plain models are no reference for packing: some read the documents before (gpt-oss), some refuse (linear
        attention without ``causal_conv1d``).
        """
        run, batches = self.runs[name], self._batches(name)
        if name != "packing":
            return self._alone([self._reference(run, batches)], name)
        rows = [unpacked(batch) for batch in batches]
        return self._alone([self._reference(run, rows), self._reference(run, rows, moved=True)], name)

    def _resume(self) -> None:
        layout = another(self.asked.layout)
        row = f"resume at {layout.name}"
        if not self._plain:
            self.rows.append(Verdict(row, NOT_RUN, detail="see loss"))
            return
        try:
            found = self._ranks("resume", layout, resume=checkpoint(self.folder / "run_train"))
        except ProcessFailed as error:
            return self._failed((row,), error)
        plain, moved = self._plain
        parts = verdicts.resumed(found[0], plain, moved, SAVED_AT)
        self.rows.append(verdicts.together(row, parts))


def begin(asked: Asked, tell: Callable[[str], None]) -> tuple[Proof, str]:
    """A proof on the devices of this machine, and what they are.

    Raises:
        ValueError: accelerators were asked for and there is none that works.
    """
    count, why = (0, "") if asked.device == "cpu" else device_count()
    if asked.device == "accelerator" and not count:
        raise ValueError(f"--device accelerator: this machine has none that works ({why}). Use cpu.")
    devices = 0 if asked.device == "auto" and count < asked.layout.world else min(count, asked.layout.world)
    return Proof(asked, devices, tell), f"{devices} accelerator(s)" if devices else "cpu"
