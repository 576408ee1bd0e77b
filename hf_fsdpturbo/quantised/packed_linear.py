"""Linear layers whose weight is in 4 bits: in full for one matmul in forward, and once more in backward.

As bitsandbytes' ``Linear4bit`` computes, which plain Transformers would put in their place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_fsdpturbo.quantised.packed_weight import PackedWeight


class _MatMul(torch.autograd.Function):
    """``x W^T + b``, keeping neither ``x`` nor ``W``: the weight is frozen, and its bytes are there in backward, too.

    FSDP gathers a unit's parameters again before the backward of anything in it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor | None, weight: PackedWeight) -> Tensor:
        ctx.weight = weight
        return nn.functional.linear(rows, weight.values(rows.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        need_rows, need_bias, _ = ctx.needs_input_grad
        of_rows = gradient @ ctx.weight.values(gradient.dtype) if need_rows else None
        of_bias = gradient.flatten(0, -2).sum(0) if need_bias else None
        return of_rows, of_bias, None


class PackedForward:
    """Callable in place of ``linear.forward``: same argument; in autocast's dtype, else in that of the rows."""

    def __init__(self, linear: nn.Linear, weight: PackedWeight) -> None:
        self.linear, self.weight = linear, weight

    def __call__(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        bias = None if self.linear.bias is None else self.linear.bias.to(dtype)
        output: Tensor = _MatMul.apply(input.to(dtype), bias, self.weight)
        return output
