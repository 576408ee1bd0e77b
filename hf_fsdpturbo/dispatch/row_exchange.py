"""All-to-all of rows with uneven splits, differentiable: the gradient travels the same road backwards.

Eight ranks, one group; rank r holds one block per destination, and receives one block per source:

    rank 0: [to0 to1 .. to7]  --all_to_all-->  rank 0: [from0 from1 .. from7]
    rank 1: [to0 to1 .. to7]                   rank 1: [from0 from1 .. from7]
      ..                                         ..
    rank 7: [to0 to1 .. to7]                   rank 7: [from0 from1 .. from7]

Block lengths differ (``splits``), may be zero, and swap sides in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_fsdpturbo.dispatch.traffic import TRAFFIC


def exchange_rows(rows: Tensor, output_splits: list[int], input_splits: list[int], group: ProcessGroup) -> Tensor:
    """One all-to-all-v without autograd: ``rows [sum(input_splits), ...]`` -> ``[sum(output_splits), ...]``."""
    received = rows.new_empty((sum(output_splits), *rows.shape[1:]))
    TRAFFIC.sent(rows, input_splits, group)
    with TRAFFIC.waiting(rows.device):
        dist.all_to_all_single(received, rows.contiguous(), output_splits, input_splits, group=group)
    return received


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, output_splits: list[int], input_splits: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.road = (input_splits, output_splits, group)
        return exchange_rows(rows, output_splits, input_splits, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return exchange_rows(gradients[0], *ctx.road), None, None, None


def all_to_all_rows(rows: Tensor, output_splits: list[int], input_splits: list[int], group: ProcessGroup) -> Tensor:
    """Send ``input_splits[r]`` rows to rank r of the group and receive ``output_splits[r]`` from it.

    Args:
        rows: ``[sum(input_splits), ...]``, blocks in order of destination.
        output_splits: rows to receive from each rank (host integers, zeros allowed).
        input_splits: rows to send to each rank.
        group: all its ranks call this together, and together again in backward.

    Returns:
        ``[sum(output_splits), ...]``, blocks in order of source; differentiable in ``rows``.
    """
    return _AllToAllRows.apply(rows, output_splits, input_splits, group)
