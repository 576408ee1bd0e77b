"""Collectives of context parallelism, each differentiable: sequence <-> heads, gather, columns of the previous rank.

B batch, S whole sequence, s = S / P this rank's slice, P ranks of the cp group, H all heads, h = H / P, X any last
dim, C channels, W columns.

Eight ranks, cp group (0 1 2 3): before, a rank holds all heads of its slice; after, its heads of the whole sequence.

             slice0  slice1  slice2  slice3               slice0  slice1  slice2  slice3
    head0    rank0   rank1   rank2   rank3       head0    rank0   rank0   rank0   rank0
    head1    rank0   rank1   rank2   rank3  ->   head1    rank1   rank1   rank1   rank1
    head2    rank0   rank1   rank2   rank3       head2    rank2   rank2   rank2   rank2
    head3    rank0   rank1   rank2   rank3       head3    rank3   rank3   rank3   rank3

Group (4 5 6 7) does the same with another batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class _AllToAllBlocks(torch.autograd.Function):
    """``[P, ...]``: block p goes to rank p. Its own transpose, so backward is the same exchange."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, blocks.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAllBlocks.apply(gradients[0], ctx.group), None


def sequence_to_heads(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Give up the other heads of this rank's slice, get this rank's heads of the whole sequence; one collective.

    Args:
        tensors: ``[B, s, H_i, X_i]`` of one dtype; P divides every H_i.
        group: the cp group.

    Returns:
        ``[B, S, H_i / P, X_i]`` for each.
    """
    size = dist.get_world_size(group)
    flat = [x.unflatten(2, (size, -1)).flatten(3) for x in tensors]  # [B, s, P, h_i * X_i]
    blocks = torch.cat(flat, dim=-1).permute(2, 0, 1, 3)
    whole = _AllToAllBlocks.apply(blocks, group).transpose(0, 1).flatten(1, 2)  # [B, S, sum(h_i * X_i)]
    parts = whole.split([x.shape[-1] for x in flat], dim=-1)
    return [part.unflatten(-1, (-1, x.shape[-1])) for part, x in zip(parts, tensors, strict=True)]


def heads_to_sequence(x_BShX: Tensor, group: ProcessGroup) -> Tensor:
    """The way back: ``[B, S, h, X]`` -> ``[B, s, H, X]``."""
    blocks = x_BShX.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1)  # [P, B, s, h, X]
    return _AllToAllBlocks.apply(blocks, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _GatherSequence(torch.autograd.Function):
    """Every rank computes the same from the whole sequence: gradients agree and backward needs no communication.

    Own slice times P: FSDP then takes the mean over all ranks, the P of one cp group included, where the sum is meant.
    """

    @staticmethod
    def forward(ctx: Any, x_BsX: Tensor, group: ProcessGroup) -> Tensor:
        ctx.size, ctx.rank = dist.get_world_size(group), dist.get_rank(group)
        return gather_plain(x_BsX, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].chunk(ctx.size, dim=1)[ctx.rank] * ctx.size, None


def gather_plain(x_BsX: Tensor, group: ProcessGroup) -> Tensor:
    """``[B, s, ...]`` -> ``[B, S, ...]`` without autograd."""
    size = dist.get_world_size(group)
    whole = x_BsX.new_empty((size * x_BsX.shape[0], *x_BsX.shape[1:]))
    dist.all_gather_into_tensor(whole, x_BsX.contiguous(), group=group)
    return whole.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)


def gather_sequence(x_BsX: Tensor, group: ProcessGroup) -> Tensor:
    """``[B, s, ...]`` -> ``[B, S, ...]`` on every rank; the gradient of a slice goes back to its rank, times P."""
    return _GatherSequence.apply(x_BsX, group)


def _shift(x: Tensor, group: ProcessGroup, step: int) -> Tensor:
    """Send ``x`` to the rank ``step`` further, receive from the one ``step`` before; zeros where there is none."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    send, receive = [0] * size, [0] * size
    if 0 <= rank + step < size:
        send[rank + step] = x.numel()
    if 0 <= rank - step < size:
        receive[rank - step] = x.numel()
    received = x.new_empty(sum(receive))
    dist.all_to_all_single(received, x.reshape(-1)[: sum(send)].contiguous(), receive, send, group=group)
    return received.view_as(x) if received.numel() else torch.zeros_like(x)


class _FromPreviousRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _shift(x.contiguous(), group, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _shift(gradients[0].contiguous(), ctx.group, -1), None


def columns_before(x_BCs: Tensor, width: int, group: ProcessGroup) -> Tensor:
    """The last ``width`` columns of the previous rank's ``[B, C, s]``, s >= width: ``[B, C, W]``; zeros on rank 0."""
    return _FromPreviousRank.apply(x_BCs[..., x_BCs.shape[-1] - width :], group)
