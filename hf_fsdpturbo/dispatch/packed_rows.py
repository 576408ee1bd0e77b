"""Rows that carry their own slots and routing weights: one exchange each way moves a token and all that is its own.

T tokens, K top-k, R rows, S slots, D hidden. A packed row, in bytes (each part ends on a 64-byte boundary, as 16-byte
loads and grouped_mm want):

    forward   [ D elements of the token | K slots, int32 | K weights, float32 ]
    backward  [ D elements of its grad  |      -         | K weight gradients ]

The whole is one tensor in the token's dtype whose tail is bits, not numbers: it is copied and exchanged, never
computed with. float64 tokens carry float64 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.dispatch.flight import Flight
from hf_fsdpturbo.dispatch.recompute import has_kept, keep_or_make
from hf_fsdpturbo.dispatch.routing_plan import RoutingPlan, Stage
from hf_fsdpturbo.ops.expert_mlp import Half, mlp_backward, mlp_down, mlp_up, stand_in
from hf_fsdpturbo.ops.torch import accumulation_dtype

_ALIGNMENT = 64


@dataclass(frozen=True)
class PackedLayout:
    """Where the parts of a packed row are: ``hidden`` D, ``top_k`` K, ``dtype`` of the token."""

    hidden: int
    top_k: int
    dtype: torch.dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        """dtype in which routing weights travel."""
        return accumulation_dtype(self.dtype)

    @property
    def _tail(self) -> int:
        return -(-self.hidden * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    @property
    def width(self) -> int:
        """Elements of a packed row."""
        tail = self.top_k * (8 if self.weight_dtype == torch.float64 else 4) + self.top_k * self.weight_dtype.itemsize
        return (self._tail + -(-tail // _ALIGNMENT) * _ALIGNMENT) // self.dtype.itemsize

    def rows(self, packed: Tensor) -> Tensor:
        """The tokens (or their gradients) ``[R, D]``, a view."""
        return packed[:, : self.hidden]

    def slots(self, packed: Tensor) -> Tensor:
        """Slots ``[R, K]`` int32, a view."""
        start = self._tail // 4
        return packed.view(torch.int32)[:, start : start + self.top_k]

    def weights(self, packed: Tensor) -> Tensor:
        """Routing weights (or their gradients) ``[R, K]``, a view."""
        slot_bytes = self.top_k * (8 if self.weight_dtype == torch.float64 else 4)  # keeps float64 on its boundary
        start = (self._tail + slot_bytes) // self.weight_dtype.itemsize
        return packed.view(self.weight_dtype)[:, start : start + self.top_k]


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weights_TK: Tensor, plan: RoutingPlan, layout: PackedLayout, ranks: int
    ) -> Tensor:
        ctx.plan, ctx.layout = plan, layout
        ctx.shape, ctx.weights_dtype = hidden_TD.shape, weights_TK.dtype
        if has_kept():  # what came of these rows is on the tape: nobody sends them again
            return hidden_TD.new_empty(1, layout.width).expand(sum(plan.send_splits), -1)
        # Rows are packed before their number is known: a token has at most one a rank and one an expert. So all of it
        # is issued while the counts travel to the host, and only the exchange is left to issue after.
        most = hidden_TD.shape[0] * min(ranks, layout.top_k)
        packed = hidden_TD.new_empty(most, layout.width)
        plan.ops.scatter_rows(hidden_TD, plan.routing.row_position_TK, layout.rows(packed), roomy=True)
        plan.place()
        plan.ops.write_pairs(plan.routing, plan.slots_TK, weights_TK, layout.slots(packed), layout.weights(packed))
        plan.finish()
        return packed[: sum(plan.send_splits)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan, layout, packed = ctx.plan, ctx.layout, gradients[0].contiguous()
        hidden = weights = None
        if ctx.needs_input_grad[0]:
            hidden = packed.new_empty(ctx.shape)
            plan.ops.gather_sum(layout.rows(packed), plan.routing.row_position_TK, hidden)
        if ctx.needs_input_grad[1]:
            weights = layout.weights(packed).gather(0, plan.routing.pair_row_TK.long()).to(ctx.weights_dtype)
        return hidden, weights, None, None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        ctx.layout, ctx.shape = layout, packed.shape
        return layout.rows(packed).clone(), layout.weights(packed).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        packed = gradients[0].new_empty(ctx.shape)
        ctx.layout.rows(packed).copy_(gradients[0])
        ctx.layout.weights(packed).copy_(gradients[1])
        return packed, None


class _PackedUp(torch.autograd.Function):
    """``expert_mlp`` on packed rows; the gradient is packed too, so that it can travel as it is.

    See Note [Recompute ends before down].
    """

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        gate_up: Tensor,
        down: Tensor,
        layout: PackedLayout,
        plan: Stage,
        flight: Flight,
        halves: list[Half],
    ) -> Tensor:
        rows_RD, slot_map = layout.rows(packed), plan.slot_map(layout.slots(packed))
        hidden_SF, weights_S = keep_or_make(
            lambda: mlp_up(plan.ops, rows_RD, layout.weights(packed), slot_map, gate_up)
        )
        ctx.save_for_backward(packed, hidden_SF, weights_S, gate_up, down)
        # Not the slot map: its view of ``packed`` would keep the rows alive through activation checkpointing.
        ctx.layout, ctx.plan, ctx.flight = layout, plan, flight
        halves.append(Half(hidden_SF, weights_S, down, slot_map, plan.ops))
        return stand_in(rows_RD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        packed, hidden_SF, weights_S, gate_up, down = ctx.saved_tensors
        layout = ctx.layout
        need_rows, *need_weights = ctx.needs_input_grad[:3]
        out = torch.empty_like(packed) if need_rows else None
        weights = mlp_backward(
            ctx.plan.ops,
            gradients[0],
            (layout.rows(packed), hidden_SF, weights_S, gate_up, down),
            ctx.plan.slot_map(layout.slots(packed)),
            tuple(need_weights),
            None if out is None else layout.rows(out),
            None if out is None else layout.weights(out),
            lambda: ctx.flight.leave(out),
        )
        return out, *weights, None, None, None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: Stage) -> Tensor:
        ctx.plan, ctx.shape = plan, rows.shape
        out_TD = rows.new_empty(plan.routing.index_TK.shape[0], rows.shape[1])
        plan.ops.gather_sum(rows.contiguous(), plan.routing.row_position_TK, out_TD)
        return out_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows = gradients[0].new_empty(ctx.shape)
        ctx.plan.ops.scatter_rows(gradients[0].contiguous(), ctx.plan.routing.row_position_TK, rows)
        return rows, None


def pack_rows(hidden_TD: Tensor, weights_TK: Tensor, plan: RoutingPlan, layout: PackedLayout, ranks: int) -> Tensor:
    """One packed row per (token, destination), by destination: ``[sum(send_splits), layout.width]``.

    Finishes the plan, of which ``ranks`` is the number of destinations: those of its exchange's group.
    """
    return _Pack.apply(hidden_TD.contiguous(), weights_TK.contiguous(), plan, layout, ranks)


def unpack_rows(packed: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """``(tokens [R, D], routing weights [R, K])`` of received rows, differentiable."""
    return _Unpack.apply(packed, layout)


def packed_expert_mlp(
    packed: Tensor, gate_up: Tensor, down: Tensor, layout: PackedLayout, plan: Stage, flight: Flight
) -> Callable[[], Tensor]:
    """``ops.expert_mlp`` on received packed rows, its first half; what is returned runs the second, once.

    That gives ``[R, D]``, differentiable in rows, their weights and the experts'. In backward the
    rows' gradient leaves by ``flight`` while the gradient of ``gate_up`` is computed.
    """
    halves: list[Half] = []
    return partial(mlp_down, _PackedUp.apply(packed, gate_up, down, layout, plan, flight, halves), halves)


def sum_rows(rows: Tensor, plan: Stage) -> Tensor:
    """Each token's rows, back from their destinations, summed: ``[sum(send_splits), D]`` -> ``[T, D]``."""
    return _SumRows.apply(rows, plan)
