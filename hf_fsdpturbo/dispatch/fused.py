"""The fused dispatcher: a token travels once to a rank, with its slots and weights; the owner copies and sums.

T tokens, K top-k, R received rows, S slots, E / L all / local experts, D hidden. Eight ranks, K = 8, token t with
experts on ranks 0, 0, 0, 2, 2, 5, 5, 7:

    rank r: row t -> one packed row each to ranks 0, 2, 5, 7      eager sends 8 rows, this sends 4
                       counts gather, rows packed meanwhile
                       all-to-all-v of packed rows        |
    rank 0: R rows -> S slots sorted by expert -> grouped matmuls -> weighted sum per row, R rows
                       all-to-all-v back                  |
    rank r: token t = sum of its 4 rows                   [T, D]

One gather of counts and one host sync a layer, none for a group of one and none in recompute. Experts that are not
plain SwiGLU run their own forward on the slots, inside the same exchange. Over nodes the exchange has two stages, with
one gather of counts and one host sync all the same: ``over_nodes.py`` draws it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_fsdpturbo.dispatch.dispatcher import Dispatcher, LocalExperts
from hf_fsdpturbo.dispatch.flight import Flight, send_rows
from hf_fsdpturbo.dispatch.node_plan import plan_over_nodes
from hf_fsdpturbo.dispatch.over_nodes import relay_rows
from hf_fsdpturbo.dispatch.packed_rows import PackedLayout, pack_rows, packed_expert_mlp, sum_rows, unpack_rows
from hf_fsdpturbo.dispatch.recompute import keep_or_make, record_or_replay
from hf_fsdpturbo.dispatch.routing_plan import RoutingPlan, Stage, plan_slices
from hf_fsdpturbo.dispatch.row_exchange import all_to_all_rows
from hf_fsdpturbo.node_groups import NodeGroups
from hf_fsdpturbo.ops.expert_mlp import SlotMap, expert_mlp
from hf_fsdpturbo.ops.functional import permute, unpermute
from hf_fsdpturbo.ops.table import OpSet, get_ops

logger = logging.getLogger(__name__)
_told: set[str] = set()  # what was said once already, for all layers, as long as the process lives


class FusedDispatcher(Dispatcher):
    """Deduplicated exchange, grouped matmuls; the operators of the tensors' device come from ``ops``."""

    def __init__(self, group: ProcessGroup | None, num_experts: int, nodes: NodeGroups | None = None) -> None:
        super().__init__(group, num_experts, nodes)
        if self.group_size == 1:
            self.group = None

    # -- steps, shared with domino ------------------------------------------------------------------------------

    def plan(self, index_slices: list[Tensor]) -> list[RoutingPlan]:
        """Plans of slices of tokens: one gather of counts for all. Replayed, not made again, inside recompute."""
        ops, group = get_ops(index_slices[0].device.type), self.group
        assert group is not None
        return record_or_replay(lambda: plan_slices(index_slices, self.num_experts, group, ops))

    def pack(self, hidden_TD: Tensor, weights_TK: Tensor, plan: RoutingPlan) -> tuple[Tensor, PackedLayout]:
        """Rows to send, by destination, and their layout."""
        layout = PackedLayout(hidden_TD.shape[1], weights_TK.shape[1], hidden_TD.dtype)
        destinations = self.group_size if self.nodes is None else self.nodes.num_nodes
        return pack_rows(hidden_TD, weights_TK, plan, layout, destinations), layout

    def experts_on(
        self,
        packed: Tensor,
        layout: PackedLayout,
        plan: Stage,
        experts: LocalExperts,
        flight: Flight,
        plain: tuple[Tensor, Tensor] | None = None,
    ) -> Callable[[], Tensor]:
        """Local experts on received packed rows; what is returned finishes them and gives ``[R, D]`` to send back.

        Args:
            packed: rows that came by ``flight``, laid out as ``layout``.
            layout: of :meth:`pack`.
            plan: of the slice the rows belong to.
            experts: of this rank.
            flight: by which the rows' gradient may leave early.
            plain: what :meth:`plain_weights` gave, where it was asked before.
        """
        if plain is None:
            plain = self.plain_weights(packed, plan.ops, experts)
        if plain is not None:
            return packed_expert_mlp(packed, *plain, layout, plan, flight)
        rows_RD, weights_RK = unpack_rows(packed, layout)
        slot_map = plan.slot_map(layout.slots(packed.detach()).clone())
        output_RD = self.own_forward(rows_RD, weights_RK, slot_map, plan.ops, experts)
        return lambda: output_RD

    def plain_weights(self, rows: Tensor, ops: OpSet, experts: LocalExperts) -> tuple[Tensor, Tensor] | None:
        """The experts' weights if grouped matmuls can stand in for their own forward; says once when they cannot."""
        if experts.is_plain_swiglu:
            gate_up, down = experts.weights()
            if ops.supports(gate_up, down) and rows.dtype == gate_up.dtype:
                return gate_up, down
            reason = f"weights {tuple(gate_up.shape)} {gate_up.dtype} on rows of {rows.dtype} do not fit grouped_mm"
        else:
            reason = "the experts are not a plain gated SwiGLU"
        if reason not in _told and (not dist.is_initialized() or dist.get_rank() == 0):
            _told.add(reason)
            logger.warning("ep_dispatcher=fused: %s; their own forward runs inside the fused exchange.", reason)
        return None

    def own_forward(
        self, rows_RD: Tensor, weights_RK: Tensor, slot_map: SlotMap, ops: OpSet, experts: LocalExperts
    ) -> Tensor:
        """Any experts module: its own forward on the slots, between permute and unpermute."""
        rows_SD, weights_S = permute(rows_RD, slot_map, ops, weights_RK)
        output_SD = experts.forward_rows(rows_SD, _slot_experts(slot_map), None)
        return unpermute(output_SD, slot_map, ops, weights_S)

    # -- the dispatcher ------------------------------------------------------------------------------------------

    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: LocalExperts
    ) -> Tensor:
        """See :class:`hf_fsdpturbo.dispatch.dispatcher.Dispatcher`."""
        # Before the plan, whose host sync empties the device's queue: every host microsecond after it is an idle one.
        ops = get_ops(hidden_states.device.type)
        plain = self.plain_weights(hidden_states, ops, experts)
        if self.group is None:
            slot_map = record_or_replay(
                lambda: SlotMap(*ops.own_slots(top_k_index, self.num_experts), top_k_index.numel())
            )
            if plain is not None:
                return expert_mlp(hidden_states, top_k_weights, *plain, slot_map, ops, keep_or_make)
            return self.own_forward(hidden_states, top_k_weights, slot_map, ops, experts)
        if self.nodes is not None:
            return self._over_nodes(hidden_states, top_k_index, top_k_weights, experts, plain)
        (plan,) = self.plan([top_k_index])
        packed, layout = self.pack(hidden_states, top_k_weights, plan)
        flight = Flight(plan.receive_splits, plan.send_splits, self.group)
        finish = self.experts_on(send_rows(packed, flight), layout, plan, experts, flight, plain)
        return sum_rows(all_to_all_rows(finish(), plan.send_splits, plan.receive_splits, self.group), plan)

    def _over_nodes(
        self,
        hidden_TD: Tensor,
        index_TK: Tensor,
        weights_TK: Tensor,
        experts: LocalExperts,
        plain: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Two stages: to one rank a node, from there to the ranks with the token's experts, and the same way back."""
        assert self.group is not None
        assert self.nodes is not None
        group, nodes, ops = self.group, self.nodes, get_ops(hidden_TD.device.type)
        plan = record_or_replay(lambda: plan_over_nodes(index_TK, self.num_experts, group, nodes, ops))
        packed, layout = self.pack(hidden_TD, weights_TK, plan)
        near = plan.inside
        across = Flight(plan.receive_splits, plan.send_splits, nodes.across)
        inside = Flight(near.receive_splits, near.send_splits, nodes.inside)
        rows = send_rows(relay_rows(send_rows(packed, across), plan.inside, layout), inside)
        finish = self.experts_on(rows, layout, near, experts, inside, plain)
        output_RD = all_to_all_rows(finish(), near.send_splits, near.receive_splits, nodes.inside)
        node_sums = sum_rows(output_RD, near)
        return sum_rows(all_to_all_rows(node_sums, plan.send_splits, plan.receive_splits, nodes.across), plan)


def _slot_experts(slot_map: SlotMap) -> Tensor:
    """Local expert of every slot, ``[S]`` int64."""
    slot_S = torch.arange(slot_map.num_slots, device=slot_map.offsets_L.device)
    return torch.searchsorted(slot_map.offsets_L.long(), slot_S, right=True)
