"""The turn between the two stages of an exchange over nodes: rows that reached a node go on to the ranks inside it.

Eight ranks on two nodes, K = 8. Token t of rank 1 has experts on ranks 0, 0, 2, 5, 5, 5, 6, 7; a row is drawn as the
ranks it is for. In one stage five rows leave rank 1, three of them for the other node; here two leave, one of them:

    node                     0                               1
    rank         0       1       2       3   |   4       5       6       7
                      [0 2 5 6 7]
    across               |------ [5 6 7] ------------->|              one row a node, to the rank of the same place
                      [0 2]                  |       [5 6 7]
    inside      [0] <----|---> [2]           |         [5]---> [6]---> [7]   one row a rank
    experts     y0              y2           |          y5      y6      y7   weighted sum over the rank's experts
    inside      y0 ----> + <--- y2           |          y5 <--- y6 <--- y7   and back: the sum over the node
    across               + <----------------------- y5 + y6 + y7      one row a node comes home, and is summed

Backward is the same road: the gradient of t goes once to each node and from there to its ranks, where the experts' own
backward runs; the gradients of t and of its routing weights come back as one packed row a rank, then one a node.

Counts and waits: one gather of counts and one host sync, as in one stage. The gathered table holds both stages' splits
(``node_plan.py``), and a row carries the slots that say where it goes on to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.dispatch.node_plan import RelayStage
from hf_fsdpturbo.dispatch.packed_rows import PackedLayout


class _Relay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, stage: RelayStage, layout: PackedLayout) -> Tensor:
        ctx.stage, ctx.layout, ctx.shape = stage, layout, packed.shape
        stage.read(layout.slots(packed))
        out = packed.new_empty(sum(stage.send_splits), layout.width)
        stage.ops.scatter_rows(layout.rows(packed), stage.routing.row_position_TK, layout.rows(out))
        stage.ops.write_pairs(
            stage.routing, stage.slots_RK, layout.weights(packed), layout.slots(out), layout.weights(out)
        )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stage, layout, packed = ctx.stage, ctx.layout, gradients[0].contiguous()
        out = packed.new_empty(ctx.shape)
        stage.ops.gather_sum(layout.rows(packed), stage.routing.row_position_TK, layout.rows(out))
        row_RK = stage.routing.pair_row_TK.long()  # -1 where another node has the pair
        weights_RK = layout.weights(packed).gather(0, row_RK.clamp_min(0))
        layout.weights(out).copy_(weights_RK.masked_fill_(row_RK < 0, 0))
        return out, None, None


def relay_rows(packed: Tensor, stage: RelayStage, layout: PackedLayout) -> Tensor:
    """One packed row per (row, rank of this node with any of its experts), by rank.

    Args:
        packed: rows that reached this rank, ``[R, layout.width]``; their slots are numbered through the node.
        stage: the way on, whose splits are known; reads the slots.
        layout: of the rows, before and after.

    Returns:
        ``[sum(stage.send_splits), layout.width]``, differentiable.
    """
    return _Relay.apply(packed, stage, layout)
