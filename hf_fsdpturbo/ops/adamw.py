"""One AdamW step over many tensors in plain PyTorch: what CPU runs, and what the Triton kernel is compared with.

Note [The formula]. Kingma and Ba with decoupled decay (Loshchilov and Hutter), in torch's order: the weight decays,
the averages take the gradient, the weight moves by ``step_size * m / (sqrt(v) / root_correction + eps)``. All in
float32 (float64 for float64), whatever is stored; each result is rounded once, to nearest even, when it is stored.
torch's fused CUDA kernel computes the same in a mixture of float64 and float32, so that bf16 results differ where a
sum lies on the edge between two bf16 numbers. The averages move by ``w (g - m)`` with ``w = 1 - beta``, not by
``beta m + w g``: 0.999 is off by 1e-8 in float32, which 1000 steps would make 1e-5 of v.

Note [Scaled while read]. The clip factor multiplies each gradient in float32 as it is read, and the gradient in memory
stays as it was. A bf16 gradient that is scaled in memory is rounded once more.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class AdamWNumbers(NamedTuple):
    """What is the same for all tensors of one launch, worked out in float64 on the host."""

    decay: float  # lr * weight_decay
    mean_weight: float  # 1 - beta1
    square_weight: float  # 1 - beta2
    step_size: float  # lr / (1 - beta1 ** step)
    root_correction: float  # sqrt(1 - beta2 ** step)
    eps: float

    @classmethod
    def at(
        cls, step: float, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> AdamWNumbers:
        """For step number ``step``, counted from 1."""
        beta1, beta2 = betas
        step_size, root = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
        return cls(lr * weight_decay, 1 - beta1, 1 - beta2, step_size, root, eps)


class AdamWTensors(NamedTuple):
    """One parameter's tensors on this rank: of one shape and device, each of any float dtype.

    Attributes:
        copy: the weight in the dtype it computes in, to be written beside it; None where there is none.
    """

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None = None


def adamw_(tensors: list[AdamWTensors], numbers: AdamWNumbers, factor: Tensor | None = None) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`, Note [The formula] and Note [Scaled while read]."""
    for each in tensors:
        dtype = torch.float64 if each.parameter.dtype == torch.float64 else torch.float32
        weight, mean, square = (t.to(dtype) for t in (each.parameter, each.exp_avg, each.exp_avg_sq))
        gradient = each.gradient.to(dtype)
        if factor is not None:
            gradient = gradient * factor.to(gradient.device, dtype)
        weight = weight - numbers.decay * weight
        mean = mean + numbers.mean_weight * (gradient - mean)
        square = square + numbers.square_weight * (gradient * gradient - square)
        weight = weight - numbers.step_size * mean / (square.sqrt() / numbers.root_correction + numbers.eps)
        each.parameter.copy_(weight)
        each.exp_avg.copy_(mean)
        each.exp_avg_sq.copy_(square)
        if each.copy is not None:
            each.copy.copy_(each.parameter)


def square_sum(tensors: list[Tensor]) -> Tensor:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    tensors = [t.float() if t.dtype == torch.float64 else t for t in tensors]  # the norm does not narrow
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    return (norms**2).sum()
