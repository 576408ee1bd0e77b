"""``NonFinite``: the first loss or gradient norm that is not finite is named, and its step taken, skipped or the last.

Note [Without waiting for the device]. What is seen in a step stays on the device, as the smallest number of a place
(step, micro-batch, rank) where something was not finite. It is read where Trainer reads its loss anyhow: at logging
steps. ``skip`` and ``stop`` must know before the optimizer's step and read the norm, which all ranks have alike.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_fsdpturbo.checkpoint.dcp import model_tensors
from hf_fsdpturbo.ranks import everyone, rank, world_size
from hf_fsdpturbo.shards import local_tensor
from hf_fsdpturbo.trainer.loss_log import LossLog

NOWHERE = 2**62
_MICRO_BATCHES = 2**16
_DONE = {
    "warn": "The step was taken: weights may not be finite any more (skip leaves such steps out, stop ends the run).",
    "skip": "The step is left out on all ranks; weights and optimizer state are as before.",
    "stop": "The run ends before the step; weights are as before.",
}


class NonFinite(TrainerCallback):
    """One trainer's.

    Args:
        trainer: read for its model, state and norms.
        mode: ``on_nonfinite``: ``warn``, ``skip`` or ``stop``.
    """

    def __init__(self, trainer: Any, mode: str) -> None:
        self.trainer, self.mode = trainer, mode
        self.log = LossLog(trainer)
        self.micro_batch = 0
        self.skipped = False  # the last step was left out
        self.places: dict[str, Tensor] = {}  # int64 scalars by "loss" and the kinds of parameters

    def saw_loss(self, loss: Tensor) -> Tensor:
        """Note a micro-batch's loss, after its backward: between the two the device has nothing else to do.

        Returns:
            what the log shall add up. Nothing is waited for.
        """
        step = self.trainer.state.global_step + 1
        place = (step * _MICRO_BATCHES + self.micro_batch) * world_size() + rank()
        self.micro_batch += 1
        self._note("loss", loss, place)
        return self.log.filtered(loss)

    def saw_norm(self, norm: Any) -> Any:
        """The step's norm, equal on all ranks; returns it.

        Raises:
            ValueError: ``stop`` and the norm is not finite; on every rank.
        """
        self.micro_batch, self.skipped = 0, False
        step = self.trainer.state.global_step + 1
        groups = {name: value for name, value in (self.trainer.last_group_norms or {}).items() if name != "total"}
        for name, value in (groups or {"all": norm}).items():
            self._note(name, torch.as_tensor(value), step)
        if self.mode == "warn" or math.isfinite(float(norm)):
            return norm
        message = self._found()
        if self.mode == "stop":
            raise ValueError(message)
        self._say(message)
        self.skipped = True
        for parameter in self.trainer.model.parameters():
            parameter.grad = None  # an optimizer leaves parameters without a gradient, and their state, alone
        return norm

    def _note(self, name: str, value: Tensor, place: int) -> None:
        found = torch.where(torch.isfinite(value), NOWHERE, place)
        before = self.places.get(name)
        self.places[name] = found if before is None else torch.minimum(before, found)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All ranks log at the same steps, and wait for the device there."""
        if control.should_log:
            self._say(self._found())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was seen after the last logging step."""
        self._say(self._found())

    def _say(self, message: str | None) -> None:
        if message is not None and rank() == 0:
            print(f"[hf_fsdpturbo] {message}", flush=True)

    def _found(self) -> str | None:
        """The first place since the last time, in words, or None; collective, the same on every rank."""
        names = sorted(self.places)
        if not names:
            return None
        places = torch.stack([self.places[name].to(self.trainer.args.device) for name in names])
        if world_size() > 1:
            dist.all_reduce(places, op=dist.ReduceOp.MIN)
        found = {name: place for name, place in zip(names, places.tolist(), strict=True) if place != NOWHERE}
        self.places.clear()
        if not found:
            return None
        loss = found.pop("loss", None)
        parts = []
        steps = set(found.values())
        if loss is not None:
            place, on_rank = divmod(loss, world_size())
            step, micro_batch = divmod(place, _MICRO_BATCHES)
            parts.append(f"the loss of micro-batch {micro_batch} on rank {on_rank} is not finite")
            steps.add(step)
        groups = [name for name, step in found.items() if step == min(steps)]
        if groups:
            parts.append(f"the gradient norm of parameters of kind {', '.join(groups)} is not finite")
        return f"step {min(steps)}: {'; '.join(parts)}. on_nonfinite={self.mode}: {_DONE[self.mode]}"


def weights_not_finite(model: nn.Module) -> list[str]:
    """Names of the model's tensors that hold a value that is not finite, on any rank; collective, sorted.

    Each rank reads its shards once, without copies.
    """
    shards = {name: local_tensor(tensor) for name, tensor in model_tensors(model).items()}
    shards = {name: shard for name, shard in shards.items() if shard.numel() and shard.is_floating_point()}
    with torch.no_grad():
        ends = [torch.stack(torch.aminmax(shard)).isfinite().all() for shard in shards.values()]
    mine = [name for name, is_finite in zip(shards, ends, strict=True) if not bool(is_finite)]
    return sorted({name for names in everyone(mine) for name in names})
