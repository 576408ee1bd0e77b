"""Weights in full that live for one call: made for its forward, freed after it, made again for its backward.

    rows ---> open ---> the call's own operations, which save what they like ---> close ---> output
              | backward: storage freed         make(name): storage filled  |
                                                               backward: storage filled again, the same values

As FSDP does with what it gathers: what autograd saved keeps its storage, whose memory comes and goes. So it serves
any operations that read the weights, recompute included, which runs the call anew and needs nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Fill = Callable[[Tensor], None]


class Fleeting:
    """The weights of one call, by name.

    Args:
        until_backward: whether a backward may come that has only what autograd saved. Not under activation
            checkpointing, which saves nothing, nor without gradients.
    """

    def __init__(self, until_backward: bool) -> None:
        self.until_backward = until_backward
        self._made: dict[str, Tensor] = {}
        self._kept: list[tuple[Tensor, Fill, int]] = []

    def make(self, name: str, new: Callable[[], Tensor], fill: Fill, connect: Callable[[Tensor], Tensor]) -> Tensor:
        """The weight of that name: made once a call.

        Args:
            new: gives memory for it.
            fill: writes its values; in backward once more, the same ones.
            connect: ties a weight to what its gradient goes to.
        """
        if name not in self._made:
            weight = new()
            fill(weight)
            # `.data` shares the storage, but has a version of its own: filling it again changes nothing for autograd.
            self._kept.append((weight.data, fill, weight.untyped_storage().nbytes()))
            self._made[name] = connect(weight)
        return self._made[name]

    def open(self, rows: Tensor) -> Tensor:
        """The call's input, whose gradient is the last thing that backward needs the weights for."""
        if self.until_backward and rows.requires_grad:
            return _FreeAfter.apply(rows, self)
        return rows

    def close(self, output: Tensor) -> Tensor:
        """The call's output, whose gradient is the first thing of backward; the weights go."""
        if self.until_backward and output.requires_grad:
            output = _FillBefore.apply(output, self)
            self.free()
        return output

    def forget(self) -> None:
        """The call is over, or was left: what autograd did not save goes."""
        self._made.clear()
        if not self.until_backward:
            self._kept.clear()

    def fill(self) -> None:
        """All storages with their values."""
        for weight, fill, size in self._kept:
            if weight.untyped_storage().nbytes() == 0:
                weight.untyped_storage().resize_(size)
                fill(weight)

    def free(self) -> None:
        """All storages without memory."""
        for weight, _, _ in self._kept:
            weight.untyped_storage().resize_(0)


class _FillBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, weights: Fleeting) -> Tensor:
        ctx.weights = weights
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.weights.fill()
        return gradients[0], None


class _FreeAfter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Fleeting) -> Tensor:
        ctx.weights = weights
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.weights.free()
        return gradients[0], None
