"""`CheckpointHooks`: the Trainer overrides for saving and resuming, each handing on at once."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdpturbo.checkpoint import commit, dcp, facts, scheduler
from hf_fsdpturbo.checkpoint.background import BackgroundSave
from hf_fsdpturbo.checkpoint.hub import export_model
from hf_fsdpturbo.lora import adapter_files
from hf_fsdpturbo.ranks import FAILURES, CheckpointError, agree, rank, together, world_size
from hf_fsdpturbo.trainer.push import PushHooks

logger = logging.getLogger(__name__)

TRAINER_STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"


class CheckpointHooks(PushHooks):
    """Overrides of ``transformers.Trainer`` about saving and resuming; a base of the trainer mixin.

    Set on the class or the trainer:

    Attributes:
        async_save: write checkpoints in the background while training goes on; a checkpoint appears when it is whole.
            Needs host memory for one copy of this rank's model and optimizer shards.
        hub_file_bytes: size at which a Hub export begins a new file.
    """

    async_save: bool = False
    hub_file_bytes: int = 5 * 10**9

    model: Any
    args: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    _background: BackgroundSave | None = None

    # Hub format

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a checkpoint that plain Transformers loads (adapter files for a PEFT model); called by all ranks.

        Raises:
            CheckpointError: on every rank, if one could not write.
        """
        directory = output_dir or self.args.output_dir
        self._save_side_files(directory)
        if self._staging is None or self.args.save_only_model:
            self._save_weights(directory)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save_side_files(self, directory: str) -> None:
        """Config, generation config, tokenizer, training arguments; adapter files where there are adapters."""
        adapter = adapter_files.is_peft(self.model)
        state_dict = adapter_files.gather_adapter(self.model) if adapter else {}
        with together(f"saving to {directory}"):
            if rank() == 0:
                os.makedirs(directory, exist_ok=True)
                self._save(directory, state_dict=state_dict)  # type: ignore[attr-defined]
        with together(f"saving to {directory}"):
            commit.wait_visible(directory)

    def load_adapter(self, directory: str) -> None:
        """Fill the model's adapter from adapter files (ours or plain PEFT's); called by all ranks, before ``train()``.

        Raises:
            ValueError: the model has no adapter, or the files are of another one; on every rank.
        """
        with together(f"reading {directory}"):
            if not adapter_files.is_peft(self.model):
                raise ValueError("load_adapter: the model has no adapter. Pass peft_config to the trainer.")
            adapter_files.load_adapter(self.model, directory)

    def _save_weights(self, directory: str) -> None:
        if not adapter_files.is_peft(self.model):
            export_model(self.model, directory, self.hub_file_bytes)

    # checkpoint-N

    def _get_output_dir(self, trial: Any) -> str:
        """While a checkpoint is being saved, the parent class writes into staging."""
        return self._staging or super()._get_output_dir(trial)  # type: ignore[misc]

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The parent's save, in staging; then one rename."""
        self._finish_background_save()
        run_dir, name = self._get_output_dir(trial), f"checkpoint-{self.state.global_step}"
        with together(f"preparing {run_dir}"):
            if rank() == 0:
                commit.open_staging(run_dir, name)
        with together(f"preparing {run_dir}"):
            commit.wait_visible(os.path.join(commit.staging_dir(run_dir), name))
        try:
            self._save_staged(model, trial, run_dir)
            self._settle_best(run_dir, name)
            if self._background is None:
                with together(f"finishing {name}"):
                    if rank() == 0:
                        self._commit(run_dir, name)
            else:
                self._background.then(lambda: self._commit(run_dir, name))
        except CheckpointError:
            if rank() == 0:
                shutil.rmtree(commit.staging_dir(run_dir), ignore_errors=True)  # a full disk needs the space
            raise
        if self.args.push_to_hub:
            self._push_committed(os.path.join(run_dir, name))

    def _save_staged(self, model: nn.Module, trial: Any, run_dir: str) -> None:
        """Run the parent's method with staging as its output; what only one rank writes there is agreed on after."""
        error: BaseException | None = None
        self._staging = commit.staging_dir(run_dir)
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        except CheckpointError:
            raise
        except FAILURES as caught:
            error = caught
        finally:
            self._staging = None
        agree(error, f"saving step {self.state.global_step}")

    def _settle_best(self, run_dir: str, name: str) -> None:
        """The best checkpoint may be the one just written: name it by where it will be, also in its own state file."""
        staging = commit.staging_dir(run_dir)
        best = self.state.best_model_checkpoint
        if best is None or not os.path.abspath(best).startswith(os.path.abspath(staging) + os.sep):
            return
        self.state.best_model_checkpoint = os.path.join(run_dir, os.path.basename(best))
        with together(f"finishing {name}"):
            if rank() == 0:
                self.state.save_to_json(os.path.join(staging, name, TRAINER_STATE))

    def _commit(self, run_dir: str, name: str) -> None:
        """Rank 0 only: the rename, then rotation, which never touches the one just made or the best."""
        step = int(name.rpartition("-")[2])
        commit.commit(run_dir, name, {"step": step, "world_size": world_size()})
        new = os.path.join(run_dir, name)
        commit.rotate(run_dir, self.args.save_total_limit, self.state.best_model_checkpoint, new)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Model and optimizer as DCP shards, scheduler, topology.json."""
        optimizer, directory = dcp.unwrap_optimizer(self.optimizer), os.path.join(output_dir, dcp.DCP_DIR)
        with together(f"saving to {output_dir}"):
            state = dcp.gather_state(self.model, optimizer, adapter_files.is_peft(self.model))
            if rank() == 0:
                dcp.write_optimizer_json(self.model, optimizer, output_dir)
                described = facts.describe(self.model, self._sizes())
                commit.write_json(os.path.join(output_dir, facts.TOPOLOGY_JSON), described)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns whenever a scheduler is saved without its optimizer
                    torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))
        if self.async_save:
            timeout = timedelta(seconds=self.args.ddp_timeout)  # the arguments keep dist_timeout there too
            self._background = BackgroundSave(state, directory, timeout)
        else:
            dcp.save(state, directory)

    def _sizes(self) -> dict[str, int] | None:
        parallel_state = getattr(self, "parallel_state", None)
        return None if parallel_state is None else parallel_state.topology.to_dict()

    def _save_scaler(self, output_dir: str) -> None:
        with together(f"saving to {output_dir}"):
            super()._save_scaler(output_dir)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        with together(f"saving to {output_dir}"):
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _finish_background_save(self) -> None:
        """Wait until the last asynchronous save is committed, or raise on every rank what went wrong in it."""
        background, self._background = self._background, None
        if background is not None:
            agree(background.wait(), "saving in the background")

    def _abandon_background_save(self) -> None:
        """This rank leaves with an error of its own: let its files be written, but ask no other rank, which may never
        come."""
        background, self._background = self._background, None
        if background is not None:
            background.wait()

    # Resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the parent's; ``True`` resumes from the newest finished checkpoint and says what it skipped.

        Raises:
            ValueError: no finished checkpoint, or settings that cannot work; on every rank.
        """
        self._check_save_settings()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_checkpoint()
        ended = False
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
            ended = True
        finally:
            if not ended:
                self._abandon_background_save()
        self._finish_background_save()
        return result

    def _check_save_settings(self) -> None:
        if self.args.save_on_each_node and world_size() > 1:
            raise ValueError(
                "save_on_each_node=True is not supported: all ranks write one checkpoint together. Put output_dir on "
                "a file system that all nodes share, and leave save_on_each_node out."
            )
        if self.async_save and self.args.push_to_hub:
            raise ValueError("async_save=True with push_to_hub=True is not supported: leave one of them out.")

    def _newest_checkpoint(self) -> str:
        run_dir = self.args.output_dir
        found: list[Any] = [None, []]
        with together(f"looking for checkpoints in {run_dir}"):
            if rank() == 0:
                commit.restore_moved_aside(run_dir)
                found = list(commit.last_checkpoint(run_dir))
                for note in found[1]:
                    print(f"[hf_fsdpturbo] resume: {note}", flush=True)
        if world_size() > 1:
            dist.broadcast_object_list(found, src=0)
        if found[0] is None:
            raise ValueError(
                f"resume_from_checkpoint=True, but output_dir {run_dir} holds no finished checkpoint. "
                f"{'. '.join(found[1])}"
            )
        return found[0]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check the checkpoint, then fill the model in place, whatever topology wrote it."""
        with together("resuming"):
            commit.verify(resume_from_checkpoint)
            directory = os.path.join(resume_from_checkpoint, dcp.DCP_DIR)
            if not os.path.isdir(directory):
                fix = "Give it as the model's path to start a new run from it."
                if adapter_files.is_peft(self.model):
                    fix = "Call trainer.load_adapter(directory) before train() to start a new run from its adapter."
                raise ValueError(
                    f"resume_from_checkpoint: {resume_from_checkpoint} was written with save_only_model or not by "
                    f"this package, and has no optimizer shards. {fix}"
                )
            written = facts.read(resume_from_checkpoint)
            facts.check_same_model(resume_from_checkpoint, written, self.model)
        if rank() == 0 and written["topology"] != self._sizes():
            print(
                f"[hf_fsdpturbo] {resume_from_checkpoint} was written by {written['topology'] or 'one process'}; "
                f"this run has {self._sizes() or 'one process'}. Dropout draws differ from the uninterrupted run's.",
                flush=True,
            )
        dcp.load_model(directory, self.model, adapter_files.is_peft(self.model))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        directory, described = os.path.join(checkpoint, dcp.DCP_DIR), os.path.join(checkpoint, dcp.OPTIMIZER_JSON)
        optimizer = dcp.unwrap_optimizer(self.optimizer)
        dcp.load_optimizer(directory, described, self.model, optimizer)
        with together(f"reading {SCHEDULER}"):
            state = torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True)
            groups = commit.read_json(described)["groups"]
            sources = scheduler.group_sources(groups, self.model, optimizer)
            self.lr_scheduler.load_state_dict(scheduler.follow_groups(state, len(groups), sources))

    def _load_best_model(self) -> None:
        """Fill the model from the best checkpoint, which may hold shards, Hub weights or an adapter."""
        self._finish_background_save()
        best = self.state.best_model_checkpoint
        with together("load_best_model_at_end"):
            commit.verify(best)
        directory = os.path.join(best, dcp.DCP_DIR)
        if os.path.isdir(directory):
            dcp.load_model(directory, self.model, adapter_files.is_peft(self.model))
        elif adapter_files.is_peft(self.model):
            with together(f"reading {best}"):
                adapter_files.load_adapter(self.model, best)
        else:
            self._load_hub_weights(best)

    def _load_hub_weights(self, directory: str) -> None:
        """Fill the model from Hub-format weights; the trainer mixin, which can load sharded, does it."""
        raise NotImplementedError
