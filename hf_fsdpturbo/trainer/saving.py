"""``Saving``: checkpoints and Hub files of one trainer, written in staging and committed by one rename."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from hf_fsdpturbo.arguments import FSDPTurboArguments
from hf_fsdpturbo.checkpoint import commit
from hf_fsdpturbo.checkpoint.background import BackgroundSave
from hf_fsdpturbo.checkpoint.hub import export_model
from hf_fsdpturbo.checkpoint.writer import Writer
from hf_fsdpturbo.lora import adapter_files
from hf_fsdpturbo.lora.merged_export import export_merged
from hf_fsdpturbo.ranks import CheckpointError, agree, from_rank0, raised_on_every_rank, rank, together
from hf_fsdpturbo.trainer.saving_settings import check_settings
from hf_fsdpturbo.trainer.staged_checkpoint import StagedCheckpoint, save_training_state


class Saving:
    """Writes what a trainer saves; all ranks call each method together.

    Args:
        trainer: read for its model, arguments, state, optimizer and scheduler at the time of each call.
        config: whose ``checkpoint_format`` None is ``hub`` in one process, ``dcp`` in sharded runs.

    Attributes:
        staging: where the parent class writes while a checkpoint is being saved, else None.
        resumed_from: the checkpoint that the run went on from.
    """

    def __init__(self, trainer: Any, config: FSDPTurboArguments) -> None:
        self.trainer = trainer
        self.alone = trainer.parallel_state is None
        self.format = config.checkpoint_format or ("hub" if self.alone else "dcp")
        self.verify = config.verify_checkpoint
        self.staging: str | None = None
        self.resumed_from: str | None = None
        self.background: BackgroundSave | None = None
        self.writer: Writer | None = None  # on rank 0, while it trains
        self.run = ""

    # The run

    def begin(self) -> None:
        """Claim the output directory: a checkpoint has one writer.

        Raises:
            ValueError: settings that cannot work, or another live run writes there; on every rank.
        """
        check_settings(self.trainer)
        args = self.trainer.args
        if args.save_strategy == "no":
            return
        with raised_on_every_rank("output_dir"):
            if rank() == 0:
                self.writer = Writer(args.output_dir)
                if self.writer.note:
                    print(f"[hf_fsdpturbo] {self.writer.note}", flush=True)
        self.run = from_rank0(self.writer and self.writer.run)

    def end(self, ended: bool) -> None:
        """Finish what is being saved, or (not ``ended``: this rank leaves with an error) only this rank's part."""
        try:
            self.finish() if ended else self.abandon()
        finally:
            if self.writer is not None:
                self.writer.release()
            self.writer = None

    @property
    def each_node(self) -> bool:
        """``save_on_each_node`` in a sharded run: each node's checkpoint lies on its own disk."""
        return bool(self.trainer.args.save_on_each_node) and not self.alone

    @property
    def leads(self) -> bool:
        """Whether this rank does what is done once a folder: rank 0, or one rank of each node that has its own."""
        return rank() == 0 or (self.each_node and self.trainer.args.local_process_index == 0)

    @property
    def as_plain(self) -> bool:
        """One process writes plain Trainer's own files."""
        return self.alone and self.format == "hub"

    @property
    def with_weights(self) -> bool:
        """Whether a ``checkpoint-N`` holds weights that Transformers loads."""
        return self.trainer.args.save_only_model or self.format != "dcp"

    @property
    def left_to_parent(self) -> bool:
        """Whether the parent's ``save_model`` writes: adapters, and models without a config, of one process."""
        return (
            self.alone
            and not isinstance(self.trainer.model, PreTrainedModel)
            and (self.staging is None or self.as_plain)
        )

    # Hub format

    def save_model(self, output_dir: str | None) -> None:
        """A checkpoint that plain Transformers loads (adapter files for a PEFT model).

        Raises:
            CheckpointError: on every rank, if one could not write.
        """
        directory = output_dir or self.trainer.args.output_dir
        self._save_side_files(directory)
        if (self.staging is None or self.with_weights) and not adapter_files.is_peft(self.trainer.model):
            export_model(self.trainer.model, directory, self.trainer.hub_file_bytes, one_disk=not self.each_node)

    def save_merged_model(self, output_dir: str) -> None:
        """A Hub checkpoint with the adapter merged into the base weights.

        Raises:
            ValueError: the model has no adapter.
            CheckpointError: on every rank, if one could not write.
        """
        trainer = self.trainer
        if not adapter_files.is_peft(trainer.model):
            raise ValueError("save_merged_model: the model has no adapter. Use save_model.")
        export_merged(trainer.model, output_dir, trainer.hub_file_bytes, trainer.processing_class)

    def _save_side_files(self, directory: str) -> None:
        """Config, generation config, tokenizer, training arguments; adapter files where there are adapters."""
        adapter = adapter_files.is_peft(self.trainer.model)
        state_dict = adapter_files.gather_adapter(self.trainer.model) if adapter else {}
        if adapter and self.each_node:
            state_dict = from_rank0(state_dict)
        with together(f"saving to {directory}"):
            if self.leads:
                os.makedirs(directory, exist_ok=True)
                self.trainer._save(directory, state_dict=state_dict)
        with together(f"saving to {directory}"):
            commit.wait_visible(directory)

    # checkpoint-N

    def save_checkpoint(self, save: Callable[[], None], run_dir: str) -> None:
        """``save()``, the parent's own, with its output in staging; then one rename.

        Raises:
            CheckpointError: on every rank, if one could not write; nothing is left in the way of the next save.
        """
        self.finish()
        staged = StagedCheckpoint(self, run_dir)
        staged.open()
        try:
            staged.write(save)
            staged.settle_best()
            found = staged.weights()
            if self.background is None:
                with together(f"finishing {staged.name}"):
                    if self.leads:
                        staged.commit(found)
            else:
                self.background.then(lambda: staged.commit(found))
        except CheckpointError:
            staged.clear()
            raise
        if self.trainer.args.push_to_hub:
            self._push(os.path.join(run_dir, staged.name))

    def save_training_state(self, output_dir: str) -> None:
        """As :func:`hf_fsdpturbo.trainer.staged_checkpoint.save_training_state`."""
        save_training_state(self, output_dir)

    # Saves in the background

    def finish(self) -> None:
        """Wait until the last asynchronous save is committed, or raise on every rank what went wrong in it."""
        background, self.background = self.background, None
        if background is not None:
            agree(background.wait(), "saving in the background")

    def abandon(self) -> None:
        """This rank leaves with an error of its own: its files are written, but no other rank is asked.

        None may ever come.
        """
        background, self.background = self.background, None
        if background is not None:
            background.wait(leaving=True)

    # Uploads

    def _push(self, checkpoint: str) -> None:
        """Upload after the commit. Shards are no use to a reader of the Hub, so a model in them is exported first."""
        if not from_rank0(rank() == 0 and self._push_is_due()):
            return
        if not self.with_weights:
            self.trainer.save_model(self.trainer.args.output_dir, _internal_call=True)
        self.trainer._push_from_checkpoint(checkpoint)

    def _push_is_due(self) -> bool:
        """The parent's own conditions, asked before the export."""
        args, in_progress = self.trainer.args, getattr(self.trainer, "push_in_progress", None)
        busy = in_progress is not None and not in_progress.is_done()
        return args.hub_strategy != "end" and (args.hub_always_push or not busy)
