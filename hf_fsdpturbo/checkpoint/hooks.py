"""`CheckpointHooks`: the Trainer overrides for saving and resuming, each handing on at once."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


class CheckpointHooks:
    """Overrides of ``transformers.Trainer`` about saving; a base of the trainer mixin."""

    model: Any
    args: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a checkpoint that plain Transformers loads; called by all ranks."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state_dict = get_model_state_dict(self.model, options=options)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state_dict)  # type: ignore[attr-defined]
        dist.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]
