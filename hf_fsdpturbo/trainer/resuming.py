"""Resuming a trainer: which checkpoint, is it whole and of this model, and filling model, optimizer, scheduler."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers.trainer_utils import has_length

from hf_fsdpturbo.checkpoint import commit, dcp, facts, intact, scheduler
from hf_fsdpturbo.checkpoint.dcp_read import SavedDirectory
from hf_fsdpturbo.lora import adapter_files
from hf_fsdpturbo.parallelize.reload import reload_weights
from hf_fsdpturbo.ranks import from_rank0, rank, together
from hf_fsdpturbo.trainer.saving import SCHEDULER, TRAINER_STATE, sizes_of


def newest_checkpoint(run_dir: str) -> str:
    """The newest finished checkpoint of a run; says what it skipped. Collective.

    Raises:
        ValueError: there is none; on every rank.
    """
    found: list[Any] = [None, []]
    with together(f"looking for checkpoints in {run_dir}"):
        if rank() == 0:
            commit.restore_moved_aside(run_dir)
            found = list(commit.last_checkpoint(run_dir))
            for note in found[1]:
                print(f"[hf_fsdpturbo] resume: {note}", flush=True)
    newest, notes = from_rank0(found)
    if newest is None:
        raise ValueError(
            f"resume_from_checkpoint=True, but output_dir {run_dir} holds no finished checkpoint. {'. '.join(notes)}"
        )
    return newest


def load_model(trainer: Any, checkpoint: str) -> SavedDirectory:
    """Check a checkpoint, then fill the trainer's model in place, whatever topology wrote it. Collective.

    Returns:
        the opened shards, for :func:`load_training_state`: their index is read once.

    Raises:
        ValueError: not finished, without shards, or of another model; on every rank.
    """
    model, adapted = trainer.model, adapter_files.is_peft(trainer.model)
    directory = os.path.join(checkpoint, dcp.DCP_DIR)
    verify = trainer.args.verify_checkpoint
    fault = intact.fault_in(checkpoint, verify)
    with together("resuming"):
        if fault is not None:
            raise fault
        if not os.path.isdir(directory):
            fix = "Give it as the model's path to start a new run from it."
            if adapted:
                fix = "Call trainer.load_adapter(directory) before train() to start a new run from its adapter."
            raise ValueError(
                f"resume_from_checkpoint: {checkpoint} was written with save_only_model or not by "
                f"this package, and has no optimizer shards. {fix}"
            )
        written = facts.read(checkpoint)
        facts.check_same_model(checkpoint, written, model)
    if rank() == 0 and written["topology"] != sizes_of(trainer):
        print(
            f"[hf_fsdpturbo] {checkpoint} was written by {written['topology'] or 'one process'}; this run has "
            f"{sizes_of(trainer) or 'one process'}. Dropout draws differ from the uninterrupted run's.",
            flush=True,
        )
    opened = SavedDirectory(directory, verify)
    if rank() == 0 and verify and not opened.proven:
        print(f"[hf_fsdpturbo] {checkpoint} was written without checksums: none are compared.", flush=True)
    dcp.load_model(opened, model, adapted)
    return opened


def place_in_stream(trainer: Any, checkpoint: str | None, found: tuple[int, int]) -> tuple[int, int]:
    """Finished epochs, and batches of the one in progress, that a resumed run has behind it.

    Args:
        checkpoint: what is resumed from, if anything.
        found: Trainer's answer, which takes a stream's ``max_steps`` for one epoch, and would skip all finished steps
            in one pass, however short the stream is.
    """
    path = None if checkpoint is None else os.path.join(checkpoint, TRAINER_STATE)
    if path is None or has_length(trainer.train_dataset) or not os.path.isfile(path):
        return found
    saved = commit.read_json(path)  # Trainer has written this run's max_steps over the saved one by now
    epochs, part = divmod(saved["epoch"], 1)  # a pass is one epoch; its batches count as parts of saved max_steps
    steps = round(part * saved["max_steps"])
    skipped = 0 if trainer.args.ignore_data_skip else steps * trainer.args.gradient_accumulation_steps
    return int(epochs), skipped


def load_training_state(trainer: Any, checkpoint: str, opened: SavedDirectory | None) -> None:
    """Fill optimizer and scheduler. Collective.

    Args:
        trainer: read and filled.
        checkpoint: the directory.
        opened: its shards, where they are open.

    Raises:
        CheckpointError: another optimizer class, other parameters, or unreadable files; on every rank.
    """
    if opened is None:
        opened = SavedDirectory(os.path.join(checkpoint, dcp.DCP_DIR), trainer.args.verify_checkpoint)
    described = os.path.join(checkpoint, dcp.OPTIMIZER_JSON)
    optimizer = dcp.unwrap_optimizer(trainer.optimizer)
    dcp.load_optimizer(opened, described, trainer.model, optimizer)
    with together(f"reading {SCHEDULER}"):
        state = torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True)
        groups = commit.read_json(described)["groups"]
        sources = scheduler.group_sources(groups, trainer.model, optimizer)
        trainer.lr_scheduler.load_state_dict(scheduler.follow_groups(state, len(groups), sources))


def load_adapter(model: Any, directory: str) -> None:
    """Fill the model's adapter from adapter files. Collective.

    Raises:
        ValueError: the model has no adapter, or the files are of another one; on every rank.
    """
    with together(f"reading {directory}"):
        if not adapter_files.is_peft(model):
            raise ValueError("load_adapter: the model has no adapter. Pass peft_config to the trainer.")
        adapter_files.load_adapter(model, directory)


def load_best_model(trainer: Any) -> None:
    """Fill the model from the best checkpoint, which may hold shards, Hub weights or an adapter. Collective."""
    best, adapted = trainer.state.best_model_checkpoint, adapter_files.is_peft(trainer.model)
    verify = trainer.args.verify_checkpoint
    fault = intact.fault_in(best, verify)
    with together("load_best_model_at_end"):
        if fault is not None:
            raise fault
    directory = os.path.join(best, dcp.DCP_DIR)
    if os.path.isdir(directory):
        dcp.load_model(SavedDirectory(directory, verify), trainer.model, adapted)
    elif adapted:
        with together(f"reading {best}"):
            adapter_files.load_adapter(trainer.model, best)
    else:
        reload_weights(trainer.model, best, trainer.args, trainer.parallel_state)
