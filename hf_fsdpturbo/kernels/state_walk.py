"""The walk of the gated delta rule's state from chunk to chunk, forward and backward, one small matmul a chunk.

Shape legend: P chunks, M matrices (rows times value heads), C chunk size, Dk / Dv key / value head size.

A chunk reads the state ``s`` that the one before left, and leaves another:

    c = u - w s                      what its positions write, less what the state already holds
    out = r s + a c
    s' = d s + k^T c = (d - k^T w) s + k^T u

Only ``s`` has to be walked; with ``A = d - k^T w`` and ``B = k^T u`` made for all chunks at once the walk is
``s' = A s + B``, and ``c``, ``out`` and every gradient are matmuls over all chunks together. A walk that computes
all of it a chunk at a time, and leaves its backward to autograd, launches some twenty kernels a chunk: the host, not
the device, then sets the pace (72 ms for a layer of 8,192 tokens on an H200, of which the device works 34).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def walk(
    values: Tensor, reads: Tensor, attention: Tensor, queries: Tensor, keys: Tensor, decays: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs of all chunks and the last state; differentiable once in every argument.

    Args:
        values: ``u [P, M, C, Dv]``.
        reads: ``w [P, M, C, Dk]``, how each position's write reads the state.
        attention: ``a [P, M, C, C]``, inside the chunk.
        queries: ``r [P, M, C, Dk]``.
        keys: ``k [P, M, C, Dk]``.
        decays: ``d [P, M]``.
        state: ``[M, Dk, Dv]`` before the first chunk.

    Returns:
        ``out [P, M, C, Dv]`` and the state ``[M, Dk, Dv]`` after the last chunk, in the arguments' dtype.
    """
    flat = (x.flatten(0, 1) for x in (values, reads, attention, queries, keys, decays))
    out, state = _Walk.apply(*flat, state)  # type: ignore[no-untyped-call]
    return out.unflatten(0, values.shape[:2]), state


def minus_product(left: Tensor, right: Tensor) -> Tensor:
    """``-(left @ right)`` of batches of matrices, in one pass."""
    out = left.new_empty(len(left), left.shape[1], right.shape[2])
    return out.baddbmm_(left, right, beta=0, alpha=-1)  # beta 0: what is there is not read


def _steps(decays: Tensor, keys: Tensor, reads: Tensor, matrices: int) -> Tensor:
    """``A [P, M, Dk, Dk]``."""
    taken = minus_product(keys.mT, reads)
    taken.diagonal(dim1=-2, dim2=-1).add_(decays.unsqueeze(-1))
    return taken.unflatten(0, (-1, matrices))


class _Walk(torch.autograd.Function):
    """The walk with P and M in one dim, ``[P * M, ...]``; the state ``[M, Dk, Dv]``."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, reads: Tensor, attention: Tensor, queries: Tensor, keys: Tensor, decays: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        matrices = len(state)
        states = state.new_empty(len(values) // matrices + 1, *state.shape)
        states[0] = state
        before = states[:-1].flatten(0, 1)
        torch.bmm(keys.mT, values, out=states[1:].flatten(0, 1))
        walked, steps = states.unbind(0), _steps(decays, keys, reads, matrices).unbind(0)
        for chunk, step in enumerate(steps):
            walked[chunk + 1].baddbmm_(step, walked[chunk])
        corrections = torch.baddbmm(values, reads, before, alpha=-1)
        out = torch.bmm(queries, before).baddbmm_(attention, corrections)
        ctx.save_for_backward(values, reads, attention, queries, keys, decays, states)
        return out, states[-1].clone()

    @staticmethod
    @once_differentiable  # type: ignore[no-untyped-call, untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
        values, reads, attention, queries, keys, decays, states = ctx.saved_tensors
        before = states[:-1].flatten(0, 1)
        corrections = torch.baddbmm(values, reads, before, alpha=-1)
        grad_out = grad_out.contiguous()
        grad_values = torch.bmm(attention.mT, grad_out)
        # Of each state: what outputs and writes of the chunk after it ask; then the walk, from the last to the first.
        grads = torch.empty_like(states)
        asked = torch.bmm(queries.mT, grad_out, out=grads[:-1].flatten(0, 1))
        asked.baddbmm_(reads.mT, grad_values, alpha=-1)
        grads[-1] = grad_state
        walked, steps = grads.unbind(0), _steps(decays, keys, reads, states.shape[1]).mT.unbind(0)
        for chunk in reversed(range(len(steps))):
            walked[chunk].baddbmm_(steps[chunk], walked[chunk + 1])
        after = grads[1:].flatten(0, 1)
        grad_values.baddbmm_(keys, after)
        return (
            grad_values,
            minus_product(grad_values, before.mT),
            torch.bmm(grad_out, corrections.mT),
            torch.bmm(grad_out, before.mT),
            torch.bmm(corrections, after.mT),
            (after * before).sum((-2, -1)),
            grads[0],
        )
