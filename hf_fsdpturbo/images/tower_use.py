"""A step's gradients of what only images reach: zeros where a rank had no images, none where no rank had.

    forward ends       every trainable parameter beside the text model gets a gradient of zeros, on every rank: FSDP
                       then reduces the same list everywhere, and zeros change no sum. Which parts ran here since the
                       last step goes into a small all-reduce, which nobody waits for
    backward           adds to the zeros on ranks that had images
    before the norm    a part that ran on no rank loses its gradients: AdamW decays a weight whose gradient is zero
                       and moves it by its momentum, but leaves one alone whose gradient is None, as in one process.
                       Only a rank that lacks a part reads the answer, which is older than the backward
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdpturbo.dispatch.side_stream import beside
from hf_fsdpturbo.images.modality_experts import VISION, call_by_all
from hf_fsdpturbo.images.towers import Beside
from hf_fsdpturbo.sharding.outer_fsdp import managed_parameters, owner_of

ATTRIBUTE = "fsdpturbo_tower_use"


class TowerUse:
    """Watches what only images reach in one sharded model.

    Args:
        model: the root that FSDP wraps.
        found: what lies beside its text model.
        device: where collectives run.

    Attributes:
        parts: the towers; then, as one part, experts in the layers that only image tokens reach, if there are such.
        ran: for each part, whether it ran on this rank with gradients since the last :meth:`settle`.
    """

    def __init__(self, model: nn.Module, found: Beside, device: torch.device) -> None:
        self.device = device
        self.parts: list[list[nn.Module]] = [[tower] for tower in found.towers.values()]
        self.holders = found.holders
        for index, (tower,) in enumerate(self.parts):
            for module in (tower, *tower.children()):  # some models call a tower's parts
                module.register_forward_pre_hook(partial(self._saw, index))
        blocks = call_by_all(model)
        for block in blocks:
            block.register_forward_hook(partial(self._saw_experts, len(self.parts)))
        if blocks:
            self.parts.append([block.get_submodule(VISION) for block in blocks])
        self.ran = [False] * len(self.parts)
        self.records = list(_trainable(model, found))
        self._answer: _Answer | None = None
        setattr(model, ATTRIBUTE, self)
        if any(parameter.requires_grad for part in self.parts for module in part for parameter in module.parameters()):
            model.register_forward_hook(self._forward_ended)

    def _saw(self, index: int, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.ran[index] = True

    def _saw_experts(self, index: int, block: nn.Module, *_: Any) -> None:
        call: Any = block.forward
        if call.ran:
            self._saw(index)

    def _forward_ended(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for record in self.records:
            whole = record.unsharded_param
            if record.sharded_param.requires_grad and whole.grad is None:  # it may have been frozen since
                whole.grad = torch.zeros_like(whole)
        self._answer = _Answer(self.ran, self.device)  # counts from the last step on: the newest says it all

    def settle(self) -> None:
        """Drop gradients of parts that ran on no rank since the last call; once a step, before the norm."""
        if self._answer is None:
            return
        used = self.ran if all(self.ran) else self._answer.read()
        unused = [module for part, ran in zip(self.parts, used, strict=True) if not ran for module in part]
        parameters = [parameter for module in unused for parameter in module.parameters()]
        if not any(used):
            parameters += [parameter for holder in self.holders for parameter in holder.parameters(recurse=False)]
        for parameter in parameters:
            parameter.grad = None
        self.ran, self._answer = [False] * len(self.parts), None


class _Answer:
    """For each part, whether it ran on any rank: an all-reduce that is under way.

    Args:
        ran: this rank's.
        device: of the collective.
    """

    def __init__(self, ran: list[bool], device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._used = torch.tensor(ran, dtype=torch.float32, pin_memory=not on_host)
        self._work: Any = None
        if on_host:
            self._work = dist.all_reduce(self._used, op=dist.ReduceOp.MAX, async_op=True)
            return
        there = self._used.to(device, non_blocking=True)
        dist.all_reduce(there, op=dist.ReduceOp.MAX)
        with beside(device, there) as block:  # the host's copy is behind the forward, and behind no backward
            self._used.copy_(there, non_blocking=True)
        self._side = block.work

    def read(self) -> list[bool]:
        """Waits for the all-reduce, and for nothing that was issued after it."""
        if self._work is not None:
            self._work.wait()
        else:
            self._side.synchronize()
        return [value > 0 for value in self._used.tolist()]


def _trainable(model: nn.Module, found: Beside) -> Iterator[Any]:
    """FSDP's records of trainable parameters beside the text model."""
    owners = {module for tower in found.towers.values() for module in tower.modules()} | set(found.holders)
    for record in managed_parameters(model):
        if owner_of(record) in owners and record.sharded_param.requires_grad:
            yield record


def tower_use(model: nn.Module) -> TowerUse | None:
    """The watch of a model, also inside an adapter's wrapper; None where no batch may have images."""
    found = (vars(module).get(ATTRIBUTE) for module in model.modules())
    return next((watch for watch in found if watch is not None), None)
