"""The walk of the gated delta rule's state from chunk to chunk, forward and backward, one small matmul a chunk.

Shape legend: P chunks, M matrices (rows times value heads), C chunk size, Dk / Dv key / value head size.

A chunk reads the state ``s`` that the one before left, and leaves another:

    c = u - w s                      what its positions write, less what the state already holds
    out = r s + a c
    s' = d s + k c = (d - k w) s + k u

Only ``s`` has to be walked; with ``A = d - k w`` and ``B = k u`` made for all chunks at once the walk is
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
        keys: ``k [P, M, Dk, C]``.
        decays: ``d [P, M, 1, 1]``.
        state: ``[M, Dk, Dv]`` before the first chunk.

    Returns:
        ``out [P, M, C, Dv]`` and the state ``[M, Dk, Dv]`` after the last chunk, in the arguments' dtype.
    """
    return _Walk.apply(values, reads, attention, queries, keys, decays, state)  # type: ignore[no-any-return]


def _transition(decays: Tensor, keys: Tensor, reads: Tensor) -> Tensor:
    """``A [P, M, Dk, Dk]``."""
    taken = torch.matmul(keys, reads).neg_()
    taken.diagonal(dim1=-2, dim2=-1).add_(decays.squeeze(-1))
    return taken


def _corrections(values: Tensor, reads: Tensor, states: Tensor) -> Tensor:
    """``c [P, M, C, Dv]``."""
    return torch.matmul(reads, states[:-1]).neg_().add_(values)


class _Walk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, reads: Tensor, attention: Tensor, queries: Tensor, keys: Tensor, decays: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        states = state.new_empty(len(values) + 1, *state.shape)
        states[0] = state
        torch.matmul(keys, values, out=states[1:])
        walked, steps = states.unbind(0), _transition(decays, keys, reads).unbind(0)
        for chunk, step in enumerate(steps):
            walked[chunk + 1].baddbmm_(step, walked[chunk])
        out = torch.matmul(queries, states[:-1])
        out += torch.matmul(attention, _corrections(values, reads, states))
        ctx.save_for_backward(values, reads, attention, queries, keys, decays, states)
        return out, states[-1].clone()

    @staticmethod
    @once_differentiable  # type: ignore[no-untyped-call, untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
        values, reads, attention, queries, keys, decays, states = ctx.saved_tensors
        corrections = _corrections(values, reads, states)
        grad_values = torch.matmul(attention.mT, grad_out)
        # Of each state: what outputs and writes of the chunk after it ask; then the walk, from the last to the first.
        grads = torch.empty_like(states)
        torch.matmul(queries.mT, grad_out, out=grads[:-1])
        grads[:-1] -= torch.matmul(reads.mT, grad_values)
        grads[-1] = grad_state
        walked, steps = grads.unbind(0), _transition(decays, keys, reads).mT.unbind(0)
        for chunk in reversed(range(len(steps))):
            walked[chunk].baddbmm_(steps[chunk], walked[chunk + 1])
        before, after = states[:-1], grads[1:]
        grad_values += torch.matmul(keys.mT, after)
        return (
            grad_values,
            torch.matmul(grad_values, before.mT).neg_(),
            torch.matmul(grad_out, corrections.mT),
            torch.matmul(grad_out, before.mT),
            torch.matmul(after, corrections.mT),
            (after * before).sum((-2, -1), keepdim=True),
            grads[0],
        )
