"""The plan of an exchange in two stages: both stages' rows, slots and splits from one gather of counts.

T tokens, K top-k, M nodes of P / M ranks each in the ep axis of P ranks, n = P / M, E / L all / local experts, R rows
that reached this rank from its place on every node. A rank is (node, place); it gathers from every other rank

    [ E pairs per expert | P tokens per rank | M tokens per node ]

A token counts once a rank, and once a node, that holds any of its experts. Rank (b, i) relays the tokens of the ranks
(0, i) .. (M-1, i), so the table holds the splits of the second stage too: it sends (b, j) as many rows as those ranks
have tokens for (b, j). What it relays where, it reads in the rows: their slots are numbered through all ranks of the
node, in order of place.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_fsdpturbo.dispatch.routing_plan import GatheredCounts, RoutingPlan, Stage, gather_counts
from hf_fsdpturbo.node_groups import NodeGroups
from hf_fsdpturbo.ops.table import OpSet, Routing


class RelayStage(Stage):
    """The second stage: rows that reached this rank go to the ranks of its node; complete after :meth:`read`.

    Attributes:
        slots_RK: slot of every pair at the rank of this node that has its expert; -1 where another node has it.
    """

    slots_RK: Tensor

    def __init__(self, ops: OpSet, ranks: int) -> None:
        self.ops = ops
        self._ranks = ranks
        self._starts_n: Tensor | None = None

    def number(self, offsets_L: Tensor, slots_n: Tensor) -> None:
        """This rank's slots, and how many each rank of the node has, ``[n]``: what :meth:`read` needs."""
        self.offsets_L = offsets_L
        self._ends_n = slots_n.cumsum(0, dtype=torch.int32)
        self._starts_n = self._ends_n - slots_n

    def read(self, slots_RK: Tensor) -> None:
        """Where rows go, from the slots they carry, numbered through the node (-1: none). Once; no host sync."""
        if self._starts_n is None:
            return
        starts_n, self._starts_n = self._starts_n, None
        slots_RK = slots_RK.contiguous()
        elsewhere_RK = slots_RK < 0
        place_RK = torch.bucketize(slots_RK, self._ends_n, out_int32=True, right=True)
        self.slots_RK = (slots_RK - starts_n[place_RK.long()]).masked_fill_(elsewhere_RK, -1)
        # Pairs of other nodes count as those of a rank past the last: their rows would come last, and are not made.
        place_RK.masked_fill_(elsewhere_RK, self._ranks)
        routing = self.ops.count_routing(place_RK, self._ranks + 1, self._ranks + 1)
        self.routing = Routing(
            routing.index_TK,
            routing.rank_TK,
            routing.pair_row_TK.masked_fill(elsewhere_RK, -1),
            routing.row_position_TK.masked_fill(elsewhere_RK, -1),
            routing.totals_X,
        )


class NodePlan(RoutingPlan):
    """The first stage, a row a node that holds any of a token's experts; ``inside`` is the second.

    ``slots_TK`` are numbered through the ranks of the node that holds the expert. ``offsets_L`` and ``num_slots`` are
    the second stage's.
    """

    def __init__(
        self, routing: Routing, ops: OpSet, rank: int, counts: GatheredCounts, num_experts: int, nodes: NodeGroups
    ) -> None:
        super().__init__(routing, ops, rank, counts, 0)
        self.inside = RelayStage(ops, nodes.ranks_per_node)
        self._num_experts = num_experts
        self._nodes = nodes

    def _place(self, totals_PX: Tensor) -> None:
        near, experts, ep_size = self._nodes.ranks_per_node, self._num_experts, totals_PX.shape[0]
        num_local = experts // ep_size
        slots_TK, offsets_L = self.ops.slot_pairs(self.routing, totals_PX[:, : experts + ep_size], self._rank)
        pairs_E = totals_PX[:, :experts].sum(0, dtype=torch.int32)
        slots_Mn = pairs_E.view(-1, near, num_local).sum(2, dtype=torch.int32)
        starts_P = (slots_Mn.cumsum(1, dtype=torch.int32) - slots_Mn).flatten()
        self.slots_TK = slots_TK + starts_P[self.routing.index_TK.long() // num_local]
        self.inside.number(offsets_L, slots_Mn[self._rank // near])

    def _finish(self, table_PX: numpy.ndarray) -> None:
        near, experts, ep_size = self._nodes.ranks_per_node, self._num_experts, table_PX.shape[0]
        pairs_PE, ranks_PP, nodes_PM = numpy.split(table_PX, [experts, experts + ep_size], axis=1)
        node, place = divmod(self._rank, near)
        num_local = experts // ep_size
        self.send_splits = nodes_PM[self._rank].tolist()
        self.receive_splits = nodes_PM[place::near, node].tolist()
        stage = self.inside
        stage.send_splits = ranks_PP[place::near, node * near : (node + 1) * near].sum(0).tolist()
        stage.receive_splits = ranks_PP[:, self._rank].reshape(-1, near).sum(0).tolist()
        stage.num_slots = int(pairs_PE[:, self._rank * num_local : (self._rank + 1) * num_local].sum())


def plan_over_nodes(
    index_TK: Tensor, num_experts: int, group: ProcessGroup, nodes: NodeGroups, ops: OpSet
) -> NodePlan:
    """Plan both stages: one gather of counts over the whole ep group.

    Args:
        index_TK: ``top_k_index``, experts numbered over the group.
        num_experts: experts over the whole group.
        group: the ep axis; all its ranks call this together.
        nodes: which it spans.
        ops: operators of the device.
    """
    ep_size = nodes.num_nodes * nodes.ranks_per_node
    by_node = ops.count_routing(index_TK, num_experts, nodes.num_nodes)
    by_rank = ops.count_routing(index_TK, num_experts, ep_size)
    totals_X = torch.cat([by_rank.totals_X, by_node.totals_X[num_experts:]])
    counts = gather_counts([totals_X], group)
    return NodePlan(by_node, ops, torch.distributed.get_rank(group), counts, num_experts, nodes)
