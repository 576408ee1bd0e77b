"""``StagedCheckpoint``: one ``checkpoint-N`` while it is written: what is staged, and the rename at its end."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from hf_fsdpturbo.checkpoint import commit, dcp, dcp_save, facts, unused
from hf_fsdpturbo.checkpoint.background import BackgroundSave
from hf_fsdpturbo.lora import adapter_files
from hf_fsdpturbo.ranks import FAILURES, CheckpointError, agree, rank, together, world_size
from hf_fsdpturbo.trainer.nonfinite import weights_not_finite

TRAINER_STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"


class StagedCheckpoint:
    """The checkpoint of the step that a trainer has reached; all ranks call each method together.

    Args:
        saving: the trainer's :class:`Saving`, whose ``staging`` is set while the parent writes.
        run_dir: where the checkpoint will be.

    Attributes:
        name: ``checkpoint-N``.
    """

    def __init__(self, saving: Any, run_dir: str) -> None:
        self.saving, self.trainer, self.run_dir = saving, saving.trainer, run_dir
        self.name = f"checkpoint-{self.trainer.state.global_step}"

    @property
    def staging(self) -> str:
        """The folder in which ``name`` is written."""
        return commit.staging_dir(self.run_dir, self.saving.run)

    def open(self) -> None:
        """Make the folder, and wait until every rank sees it.

        Raises:
            CheckpointError: on every rank, if one could not.
        """
        with together(f"preparing {self.run_dir}"):
            if self.saving.leads:
                commit.open_staging(self.run_dir, self.name, self.saving.run)
        with together(f"preparing {self.run_dir}"):
            commit.wait_visible(os.path.join(self.staging, self.name))

    def write(self, save: Callable[[], None]) -> None:
        """``save()``, the parent's own; what only one rank writes in it is agreed on after.

        Raises:
            CheckpointError: on every rank, if one could not write.
        """
        error: BaseException | None = None
        self.saving.staging = self.staging
        try:
            save()
        except CheckpointError:
            raise
        except FAILURES as caught:
            error = caught
        finally:
            self.saving.staging = None
        agree(error, f"saving step {self.trainer.state.global_step}")

    def settle_best(self) -> None:
        """The best checkpoint may be the one just written: name it by where it will be, also in its own state file."""
        staging, state = self.staging, self.trainer.state
        best = state.best_model_checkpoint
        if best is None or not os.path.abspath(best).startswith(os.path.abspath(staging) + os.sep):
            return
        state.best_model_checkpoint = os.path.join(self.run_dir, os.path.basename(best))
        with together(f"finishing {self.name}"):
            if self.saving.leads:
                state.save_to_json(os.path.join(staging, self.name, TRAINER_STATE))

    def weights(self) -> dict[str, Any]:
        """What the record of a checkpoint says of its weights: whether all are finite, else the first names."""
        bad = weights_not_finite(self.trainer.model)
        if bad and rank() == 0:
            print(f"[hf_fsdpturbo] {self.name}: {len(bad)} tensors of the model are not finite: {bad[:5]}", flush=True)
        return {"weights_finite": not bad, **({"weights_not_finite": bad[:100]} if bad else {})}

    def commit(self, found: dict[str, Any]) -> None:
        """One rank a folder: the rename, then rotation, which never touches the one just made or the best.

        Args:
            found: more for its record.

        Raises:
            ValueError: another run has taken over the folder.
        """
        writer, run_dir, name = self.saving.writer, self.run_dir, self.name
        if writer is not None and not writer.is_ours():
            raise ValueError(f"output_dir: another run has taken over {run_dir}; {name} of this run is not written.")
        step = int(name.rpartition("-")[2])
        commit.commit(run_dir, name, {"step": step, "world_size": world_size(), **found}, self.saving.run)
        new, limit = os.path.join(run_dir, name), self.trainer.args.save_total_limit
        commit.rotate(run_dir, limit, self.trainer.state.best_model_checkpoint, new)

    def clear(self) -> None:
        """After a failure: nothing is left in the way of the next save, and a full disk needs the space."""
        if self.saving.leads:
            shutil.rmtree(commit.staging_dir(self.run_dir), ignore_errors=True)


def save_training_state(saving: Any, output_dir: str) -> None:
    """Model (unless Hub files hold it) and optimizer as DCP shards, scheduler, topology.json. Collective.

    Args:
        saving: the trainer's :class:`Saving`, which gets the ``background`` save where the trainer asks for one.
        output_dir: a ``checkpoint-N`` in staging.

    Raises:
        CheckpointError: on every rank, if one could not write.
    """
    trainer = saving.trainer
    optimizer, directory = dcp.unwrap_optimizer(trainer.optimizer), os.path.join(output_dir, dcp.DCP_DIR)
    with together(f"saving to {output_dir}"):
        adapted = adapter_files.is_peft(trainer.model)
        state = dcp.gather_state(trainer.model, optimizer, adapted)
        in_hub_files = saving.format == "hub" and not adapted
        if in_hub_files:
            state = {key: tensor for key, tensor in state.items() if not key.startswith("model.")}
        if saving.leads:
            dcp.write_optimizer_json(trainer.model, optimizer, output_dir)
            described = facts.describe(trainer.model, sizes_of(trainer), "hub" if in_hub_files else "dcp")
            commit.write_json(os.path.join(output_dir, facts.TOPOLOGY_JSON), described)
            if not adapted and saving.format == "dcp":
                unused.keep_beside(trainer.model, output_dir)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns whenever a scheduler is saved without its optimizer
                torch.save(trainer.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))
    if trainer.async_save:
        timeout = timedelta(seconds=trainer.args.ddp_timeout)  # dist_timeout has set it
        saving.background = BackgroundSave(state, directory, timeout)
    else:
        dcp_save.save(state, directory, saving.leads if saving.each_node else None)


def sizes_of(trainer: Any) -> dict[str, int] | None:
    """Sizes of the trainer's run; None in one process."""
    return None if trainer.parallel_state is None else trainer.parallel_state.topology.to_dict()
