"""Resuming a trainer: is a checkpoint whole and of this model, and filling model, optimizer, scheduler from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.trainer_utils import has_length

from hf_fsdpturbo.bounded import cut
from hf_fsdpturbo.checkpoint import commit, dcp, facts, intact, plain_trainer, scheduler
from hf_fsdpturbo.checkpoint.dcp_read import SavedDirectory
from hf_fsdpturbo.checkpoint.optimizer_file import check_optimizer_file
from hf_fsdpturbo.loading.files import check_checkpoint_files
from hf_fsdpturbo.lora import adapter_files
from hf_fsdpturbo.parallelize.reload import reload_weights
from hf_fsdpturbo.ranks import from_rank0, rank, together
from hf_fsdpturbo.trainer.staged_checkpoint import SCHEDULER, TRAINER_STATE, sizes_of


def load_model(trainer: Any, checkpoint: str, parents: Callable[[str], None]) -> SavedDirectory | None:
    """Check a checkpoint, then fill the trainer's model in place, whatever topology wrote it. Collective.

    Args:
        trainer: whose model is filled.
        checkpoint: the directory.
        parents: the parent class's method, for plain Trainer's files in one process.

    Returns:
        the opened shards, for :func:`load_training_state`: their index is read once. None of plain Trainer's files.

    Raises:
        ValueError: not finished, without an optimizer, or of another model; on every rank.
    """
    model, adapted, verify = trainer.model, adapter_files.is_peft(trainer.model), trainer._saving.verify
    trainer._saving.resumed_from = checkpoint
    if _is_plain(trainer, checkpoint):
        with together("resuming"):
            plain_trainer.check_record(checkpoint, verify)
            _refuse_weights_only(trainer, checkpoint, adapted)
        load_plain_weights(trainer, checkpoint, lambda: parents(checkpoint))
        return None
    fault = _fault_in(trainer, checkpoint)
    with together("resuming"):
        if fault is not None:
            raise fault
        written = facts.read(checkpoint)
        facts.check_same_model(checkpoint, written, model)
    if rank() == 0 and written["topology"] != sizes_of(trainer):
        print(
            f"[hf_fsdpturbo] {checkpoint} was written by {written['topology'] or 'one process'}; this run has "
            f"{sizes_of(trainer) or 'one process'}. Dropout draws differ from the uninterrupted run's.",
            flush=True,
        )
    opened = open_shards(trainer, checkpoint)
    if rank() == 0 and verify and not opened.proven:
        print(f"[hf_fsdpturbo] {checkpoint} was written without checksums: none are compared.", flush=True)
    if written.get("weights") == "hub":
        reload_weights(model, checkpoint, trainer.args, trainer.parallel_state)
    else:
        dcp.load_model(opened, model, adapted)
    return opened


def open_shards(trainer: Any, checkpoint: str) -> SavedDirectory:
    """The shards of a checkpoint. Collective."""
    kept = trainer._saving
    return SavedDirectory(os.path.join(checkpoint, dcp.DCP_DIR), kept.verify, kept.each_node)


def _fault_in(trainer: Any, checkpoint: str) -> BaseException | None:
    kept = trainer._saving
    if kept.each_node:
        return intact.fault_on_own_node(checkpoint, kept.verify, kept.leads)
    return intact.fault_in(checkpoint, kept.verify)


def _is_plain(trainer: Any, checkpoint: str) -> bool:
    """Whether to read plain Trainer's files; in one process also where nothing is, which the parent class names."""
    if trainer.parallel_state is None and not os.path.exists(checkpoint):
        return True
    return from_rank0(rank() == 0 and plain_trainer.is_plain(checkpoint))


def _refuse_weights_only(trainer: Any, checkpoint: str, adapted: bool) -> None:
    """A sharded run goes on from a state; in one process plain Trainer goes on from weights alone, and so it does."""
    if plain_trainer.optimizer_file(checkpoint) is not None:
        return
    if trainer.parallel_state is None:
        if os.path.isdir(checkpoint):
            print(f"[hf_fsdpturbo] {checkpoint} holds no optimizer: its states start at zero.", flush=True)
        return
    fix = "Give it as the model's path to start a new run from it."
    if adapted:
        fix = "Call trainer.load_adapter(directory) before train() to start a new run from its adapter."
    raise ValueError(
        f"resume_from_checkpoint: {checkpoint} was written with save_only_model (or by a tool that shards its "
        f"optimizer): it has no optimizer shards of ours and none of {list(plain_trainer.OPTIMIZERS)}. {fix}"
    )


def load_plain_weights(trainer: Any, checkpoint: str, parents: Callable[[], None]) -> None:
    """Fill the model from plain Trainer's files. Collective.

    The parent class, in one process, takes the names of the files for those of the model: where they differ (stacked
    experts), they are loaded as ``from_pretrained`` loads them.
    """
    model, adapted = trainer.model, adapter_files.is_peft(trainer.model)
    if trainer.parallel_state is not None:
        if adapted:
            with together(f"reading {checkpoint}"):
                adapter_files.load_adapter(model, checkpoint)
        else:
            reload_weights(model, checkpoint, trainer.args, trainer.parallel_state)
        return
    headers = {} if adapted or not os.path.isdir(checkpoint) else check_checkpoint_files(checkpoint)
    names = {name for header in headers.values() for name in header}
    if adapted or not isinstance(model, PreTrainedModel) or names <= model.state_dict().keys():
        parents()
    else:
        reload_weights(model, checkpoint, trainer.args, None)


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


def load_training_state(
    trainer: Any, checkpoint: str, opened: SavedDirectory | None, parents: Callable[[str], None]
) -> None:
    """Fill optimizer and scheduler. Collective.

    Args:
        trainer: read and filled.
        checkpoint: the directory.
        opened: its shards, where they are open.
        parents: the parent class's method, for plain Trainer's files in one process.

    Raises:
        CheckpointError: another optimizer class, other parameters, or unreadable files; on every rank.
    """
    optimizer = dcp.unwrap_optimizer(trainer.optimizer)
    if _is_plain(trainer, checkpoint):
        if trainer.parallel_state is None:
            parents(checkpoint)
            return
        groups = _load_plain_optimizer(trainer, checkpoint, optimizer)
    else:
        described = os.path.join(checkpoint, dcp.OPTIMIZER_JSON)
        with together(f"reading {described}"):
            check_optimizer_file(described, optimizer)
        dcp.load_optimizer(opened or open_shards(trainer, checkpoint), described, trainer.model, optimizer)
        groups = commit.read_json(described)["groups"]
    path = os.path.join(checkpoint, SCHEDULER)
    with together(f"reading {path}"):
        state = torch.load(path, weights_only=True)
        sources = scheduler.group_sources(groups, trainer.model, optimizer)
        trainer.lr_scheduler.load_state_dict(scheduler.follow_groups(state, len(groups), sources))


def _load_plain_optimizer(trainer: Any, checkpoint: str, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Fill a sharded optimizer from a whole one; its groups, by name. Collective."""
    model, path = trainer.model, plain_trainer.optimizer_file(checkpoint)
    with together(f"reading {checkpoint}"):
        if path is None:
            raise ValueError(f"{checkpoint} holds none of {list(plain_trainer.OPTIMIZERS)} here. Copy it whole.")
        decayed = set(trainer.get_decay_parameter_names(model))
        groups, state = plain_trainer.read_optimizer(path, model, decayed)
    with together(f"reading {path}"):
        plain_trainer.fill_optimizer(str(path), groups, state, model, optimizer)
    return groups


def load_adapter(model: Any, directory: str) -> None:
    """Fill the model's adapter from adapter files. Collective.

    Raises:
        ValueError: the model has no adapter, or the files are of another one; on every rank.
    """
    with together(f"reading {directory}"):
        if not adapter_files.is_peft(model):
            raise ValueError("load_adapter: the model has no adapter. Pass peft_config to the trainer.")
        adapter_files.load_adapter(model, directory)


def _refuse_elsewhere(best: str, output_dir: str, resumed_from: str | None) -> None:
    """The best checkpoint lies in this run's folder, or beside the checkpoint that the run went on from."""
    folders = [os.path.realpath(output_dir)]
    if resumed_from is not None:
        folders.append(os.path.dirname(os.path.realpath(resumed_from)))
    if os.path.dirname(os.path.realpath(best)) not in folders:
        raise ValueError(
            f"best_model_checkpoint={cut(best)} lies in none of {folders}: trainer_state.json is of another run, or "
            "the run was moved. Correct it there."
        )


def load_best_model(trainer: Any, parents: Callable[[], None]) -> None:
    """Fill the model from the best checkpoint, which may hold shards, Hub weights or an adapter. Collective."""
    best, adapted = trainer.state.best_model_checkpoint, adapter_files.is_peft(trainer.model)
    verify = trainer._saving.verify
    if _is_plain(trainer, best):
        with together("load_best_model_at_end"):
            plain_trainer.check_record(best, verify)
        load_plain_weights(trainer, best, parents)
        return
    fault = _fault_in(trainer, best)
    with together("load_best_model_at_end"):
        _refuse_elsewhere(best, trainer.args.output_dir, trainer._saving.resumed_from)
        if fault is not None:
            raise fault
        in_hub_files = facts.read(best).get("weights") == "hub"
    if in_hub_files:
        reload_weights(trainer.model, best, trainer.args, trainer.parallel_state)
    else:
        dcp.load_model(open_shards(trainer, best), trainer.model, adapted)
