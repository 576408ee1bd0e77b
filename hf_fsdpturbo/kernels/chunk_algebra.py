"""Pieces of the gated delta rule inside a chunk whose gradients, written out, take fewer passes than autograd's.

Shape legend: ``...`` chunks, rows and heads, C chunk size, Dk / Dv key / value head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

L2NORM_EPS = 1e-6  # inside the square root, as in FLA and Transformers


def solved_by_inverse(system: Tensor, values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """``(I + L)^-1 values`` and ``(I + L)^-1 keys``, with L what ``system`` has below its diagonal.

    The inverse of one small matrix a chunk serves both, and their gradients are matmuls with it: substituting all
    Dv + Dk columns, forward and again backward, takes four times as long, and leaves results column by column, which
    whatever reads them next copies.

    Args:
        system: ``[..., C, C]``; its diagonal and what is above count as those of I.
        values: ``[..., C, Dv]``.
        keys: ``[..., C, Dk]``.

    Returns:
        two contiguous tensors of the shapes of ``values`` and ``keys``, differentiable once.
    """
    flat = (x.flatten(0, -3) for x in (system, values, keys))
    found: tuple[Tensor, Tensor] = _Solved.apply(*flat)  # type: ignore[no-untyped-call]
    return found[0].view(values.shape), found[1].view(keys.shape)


class _Solved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, system: Tensor, values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
        inverse = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
        new_values, old_reads = torch.bmm(inverse, values), torch.bmm(inverse, keys)
        ctx.save_for_backward(inverse, new_values, old_reads)
        return new_values, old_reads

    @staticmethod
    @once_differentiable  # type: ignore[no-untyped-call, untyped-decorator]
    def backward(ctx: Any, grad_values: Tensor, grad_reads: Tensor) -> tuple[Tensor, ...]:
        inverse, new_values, old_reads = ctx.saved_tensors
        right_values, right_keys = torch.bmm(inverse.mT, grad_values), torch.bmm(inverse.mT, grad_reads)
        # of the system: -(I + L)^-T g x^T for each solution x, where L has elements
        system = torch.bmm(right_values, new_values.mT)
        system.baddbmm_(right_keys, old_reads.mT, beta=-1, alpha=-1)
        return system.tril_(-1), right_values, right_keys


def unit_vectors(x: Tensor, scale: float = 1.0) -> Tensor:
    """``scale * x / sqrt(x . x + eps)`` over the last dim, differentiable once."""
    found: Tensor = _UnitVectors.apply(x, scale)  # type: ignore[no-untyped-call]
    return found


class _UnitVectors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        factor = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(L2NORM_EPS)).mul_(scale)
        ctx.save_for_backward(x, factor)
        ctx.scale = scale
        return x * factor

    @staticmethod
    @once_differentiable  # type: ignore[no-untyped-call, untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, factor = ctx.saved_tensors
        along = (x * gradient).sum(-1, keepdim=True).mul_(factor**3 / ctx.scale**2)
        return (gradient * factor).addcmul_(x, along, value=-1), None
