"""`PushHooks`: uploads to the Hub wait until a checkpoint has its final name, and carry weights that readers load."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hf_fsdpturbo.ranks import rank, world_size


class PushHooks:
    """Overrides of ``transformers.Trainer`` about ``push_to_hub``; a base of ``CheckpointHooks``."""

    args: Any
    save_model: Any
    _staging: str | None = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """The parent calls this while the checkpoint is still in staging: wait for its final name."""
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _push_committed(self, checkpoint: str) -> None:
        """Upload after the commit. Shards are no use to a reader of the Hub, so the model is exported first."""
        wanted = [rank() == 0 and self._push_is_due()]
        if world_size() > 1:
            dist.broadcast_object_list(wanted, src=0)
        if not wanted[0]:
            return
        if not self.args.save_only_model:
            self.save_model(self.args.output_dir, _internal_call=True)
        self._push_from_checkpoint(checkpoint)

    def _push_is_due(self) -> bool:
        """The parent's own conditions, asked before the export."""
        in_progress = getattr(self, "push_in_progress", None)
        busy = in_progress is not None and not in_progress.is_done()
        return self.args.hub_strategy != "end" and (self.args.hub_always_push or not busy)
