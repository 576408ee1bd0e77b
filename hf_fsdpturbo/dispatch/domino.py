"""Domino: two slices of tokens, so that one slice travels while the other's experts compute, forward and backward.

T tokens, R rows, D hidden. ``->`` is an exchange on the side stream, ``[ ]`` computes on the current one:

    forward   pack0 ->0 pack1 ->1   [experts0]  ->0   [experts1]  ->1   sum0 sum1
    backward  grad1 ->1 grad0 ->0   [experts1]  ->1   [experts0]  ->0   grads of pack1, pack0

Each exchange is a pair of autograd functions, start and wait. In backward they swap roles: wait's backward starts the
reverse exchange, start's backward waits for it. Autograd runs nodes in reverse order of creation, which mirrors the
schedule above. The rows are those of fused in one stage, one a rank, over nodes too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_fsdpturbo.dispatch.dispatcher import Dispatcher, LocalExperts
from hf_fsdpturbo.dispatch.flight import Flight
from hf_fsdpturbo.dispatch.fused import FusedDispatcher
from hf_fsdpturbo.dispatch.packed_rows import sum_rows
from hf_fsdpturbo.dispatch.recompute import is_recompute
from hf_fsdpturbo.dispatch.routing_plan import RoutingPlan
from hf_fsdpturbo.node_groups import NodeGroups


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: Flight, outward: bool) -> Tensor:
        ctx.flight = flight
        return flight.depart_once(rows) if outward else flight.depart(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.flight.arrive(gradients[0]), None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        assert flight.work is not None
        flight.work.wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # What this returns has the shape autograd expects and is ignored: ``_Start.backward`` takes the exchanged
        # rows, of another number, from the flight.
        ctx.flight.leave(gradients[0])
        return gradients[0], None


class DominoDispatcher(Dispatcher):
    """Two slices over the steps of fused. A group of one has nothing to overlap and runs fused whole."""

    def __init__(self, group: ProcessGroup | None, num_experts: int, nodes: NodeGroups | None = None) -> None:
        super().__init__(group, num_experts, nodes)
        self._fused = FusedDispatcher(group, num_experts)

    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: LocalExperts
    ) -> Tensor:
        """See :class:`hf_fsdpturbo.dispatch.dispatcher.Dispatcher`. The first slice takes the odd token."""
        if self.group is None or self.group_size == 1:
            return self._fused(hidden_states, top_k_index, top_k_weights, experts)
        half = (hidden_states.shape[0] + 1) // 2
        sizes = [half, hidden_states.shape[0] - half]
        weights = top_k_weights.split(sizes)
        plans = self._fused.plan(list(top_k_index.split(sizes)))
        arriving = []
        for hidden_TD, weights_TK, plan in zip(hidden_states.split(sizes), weights, plans, strict=True):
            rows, layout = self._fused.pack(hidden_TD, weights_TK, plan)
            arriving.append((*self._start(rows, plan.receive_splits, plan.send_splits, outward=True), layout))
        returning: list[tuple[Tensor, Flight]] = []

        def send_back(finish: Callable[[], Tensor], plan: RoutingPlan) -> None:
            returning.append(self._start(finish(), plan.send_splits, plan.receive_splits, outward=False))

        waiting = []
        for (rows, flight, layout), plan in zip(arriving, plans, strict=True):
            finish = self._fused.experts_on(_Wait.apply(rows, flight), layout, plan, experts, flight)
            if is_recompute():  # it ends with the last first half: no slice is finished before
                waiting.append((finish, plan))
            else:
                send_back(finish, plan)
        for finish, plan in waiting:
            send_back(finish, plan)
        outputs = [
            sum_rows(_Wait.apply(rows, flight), plan)
            for (rows, flight), plan in zip(returning, plans, strict=True)
        ]
        return torch.cat(outputs).to(hidden_states.dtype)

    def _start(
        self, rows: Tensor, output_splits: list[int], input_splits: list[int], outward: bool
    ) -> tuple[Tensor, Flight]:
        assert self.group is not None
        flight = Flight(output_splits, input_splits, self.group)
        return _Start.apply(rows, flight, outward), flight
