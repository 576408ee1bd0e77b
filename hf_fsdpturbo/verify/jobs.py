"""What each process of a proof does, as functions of what can be sent to a new interpreter."""

from __future__ import annotations

from pathlib import Path

from hf_fsdpturbo.verify.faults import after_save, put_in
from hf_fsdpturbo.verify.few_ranks import Layout
from hf_fsdpturbo.verify.recording import Batch, Record
from hf_fsdpturbo.verify.runs import Run, in_one_process, make_trainer, on_ranks
from hf_fsdpturbo.verify.small_model import SmallModel
from hf_fsdpturbo.verify.to_prove import Asked


def rank_job(
    asked: Asked, small: SmallModel, run: Run, folder: Path, layout: Layout, cpu: bool, resume: str | None,
    saved: str | None,
) -> Record:  # fmt: skip
    """One rank of ours: train (from the checkpoint ``resume``), and save to ``saved``, where they are given."""
    trainer = make_trainer(asked, small, run, str(folder), layout, layout.dp, cpu)
    put_in(asked.fault, run.name, trainer)
    return on_ranks(trainer, resume=resume, saved=saved, after_save=after_save(asked.fault))


def plain_job(
    asked: Asked, small: SmallModel, run: Run, folder: Path, batches: list[Batch] | None, cpu: bool, moved: bool
) -> Record:
    """One plain process: TRL's trainer on ``batches`` (None: its own)."""
    trainer = make_trainer(asked, small, run, str(folder), None, asked.layout.dp, cpu)
    return in_one_process(trainer, batches, moved=moved)
