"""The expert block, forward and backward in one piece, keeping only the rows, one GEMM output and small maps.

R rows, K copies of a row at most, S slots sorted by expert, L local experts, D hidden, F ffn. Forward, for slot s of
row r with weight w (``y_e(x) = down_e (silu(gate_e x) * up_e x)``, weighted before ``down``, which is linear):

    rows [R, D] --scatter--> [S, D] --gate_up--> h [S, 2F] --silu(g) u w--> [S, F] --down--> [S, D] --sum--> [R, D]
    saved: rows                                  h                    w

Backward scatters rows and gradients again and computes the activation again beside its gradient: two memory-bound
copies instead of S (D + F) elements kept from forward to backward.

Note [Recompute ends before down]. Nothing of what follows ``h`` is needed in backward: ``down`` is linear, and the
routing weights' gradient comes out of SwiGLU's. So the block is two autograd functions. The first saves everything and
returns a stand-in of the output's shape that carries the gradient alone; the second, which fills it, saves nothing.
Activation checkpointing stops a recompute once all saved tensors are there again, which is before the second, as long
as nothing after the block saves any (a shared expert added after it does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_fsdpturbo.ops.table import OpSet
from hf_fsdpturbo.ops.torch import accumulation_dtype

Value = TypeVar("Value")
Keep = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class SlotMap:
    """Where the copies of each row stand and where experts end: ``slots_RK``, ``offsets_L`` int32, ``num_slots`` S."""

    slots_RK: Tensor
    offsets_L: Tensor
    num_slots: int


def _expand(ops: OpSet, rows_RD: Tensor, slot_map: SlotMap) -> Tensor:
    expanded_SD = rows_RD.new_empty(slot_map.num_slots, rows_RD.shape[1])
    ops.scatter_rows(rows_RD, slot_map.slots_RK, expanded_SD)
    return expanded_SD


def keep_nothing(make: Callable[[], Value]) -> Value:
    """What makes ``h``, outside recompute that keeps it."""
    return make()


def mlp_up(
    ops: OpSet, rows_RD: Tensor, weights_RK: Tensor, slot_map: SlotMap, gate_up: Tensor
) -> tuple[Tensor, Tensor]:
    """``(h [S, 2F], weights [S])``: all that :func:`mlp_down` and :func:`mlp_backward` need of the rows."""
    expanded_SD = rows_RD.new_empty(slot_map.num_slots, rows_RD.shape[1])
    weights_S = torch.empty(slot_map.num_slots, dtype=accumulation_dtype(weights_RK.dtype), device=rows_RD.device)
    ops.scatter_rows(rows_RD, slot_map.slots_RK, expanded_SD, weights_RK, weights_S)
    return ops.grouped_mm(expanded_SD, gate_up.transpose(1, 2), slot_map.offsets_L), weights_S


@dataclass
class Half:
    """What the first half of the block hands to the second past autograd; :func:`mlp_down` empties it."""

    hidden_SF: Tensor
    weights_S: Tensor
    down: Tensor
    slot_map: SlotMap
    ops: OpSet


def stand_in(rows_RD: Tensor) -> Tensor:
    """A tensor of the output's shape whose values nobody reads: see Note [Recompute ends before down]."""
    return rows_RD.new_empty(1).expand(rows_RD.shape)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in_RD: Tensor, halves: list[Half]) -> Tensor:
        half = halves.pop()
        active_SF = half.ops.swiglu(half.hidden_SF, half.weights_S)
        output_SD = half.ops.grouped_mm(active_SF, half.down.transpose(1, 2), half.slot_map.offsets_L)
        del active_SF
        output_RD = torch.empty(stand_in_RD.shape, dtype=stand_in_RD.dtype, device=stand_in_RD.device)
        half.ops.gather_sum(output_SD, half.slot_map.slots_RK, output_RD)
        return output_RD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None  # the first half's backward is that of the whole block


def mlp_down(stand_in_RD: Tensor, halves: list[Half]) -> Tensor:
    """The block's output ``[R, D]`` from what its first half put into ``halves``; the stand-in takes its gradient."""
    return _Down.apply(stand_in_RD, halves)


def mlp_backward(
    ops: OpSet,
    gradient_RD: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    slot_map: SlotMap,
    need_weights: tuple[bool, bool],
    out_rows_RD: Tensor | None,
    out_weights_RK: Tensor | None,
    rows_done: Callable[[], None] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``(gate_up, down)``, each None unless needed; those of rows and routing weights go to ``out_*``.

    ``saved`` is ``(rows_RD, hidden_SF, weights_S, gate_up, down)``. A rank without slots gives zeros. ``rows_done`` is
    called once ``out_*`` are written, before the last weight gradient: an exchange can start there.
    """
    rows_RD, hidden_SF, weights_S, gate_up, down = saved
    offsets_L = slot_map.offsets_L
    gradient_SD = _expand(ops, gradient_RD.contiguous(), slot_map)
    active_gradient_SF = ops.grouped_mm(gradient_SD, down, offsets_L)
    hidden_gradient_SF, weights_gradient_S, active_SF = ops.swiglu_backward(hidden_SF, weights_S, active_gradient_SF)
    del active_gradient_SF
    down_gradient = ops.grouped_mm(gradient_SD.t(), active_SF, offsets_L) if need_weights[1] else None
    del gradient_SD, active_SF
    if out_rows_RD is not None:
        rows_gradient_SD = ops.grouped_mm(hidden_gradient_SF, gate_up, offsets_L)
        ops.gather_sum(rows_gradient_SD, slot_map.slots_RK, out_rows_RD, weights_gradient_S, out_weights_RK)
        del rows_gradient_SD
        if rows_done is not None:
            rows_done()
    gate_up_gradient = None
    if need_weights[0]:
        gate_up_gradient = ops.grouped_mm(hidden_gradient_SF.t(), _expand(ops, rows_RD, slot_map), offsets_L)
    return gate_up_gradient, down_gradient


class _Up(torch.autograd.Function):
    """The first half of the block, with the gradient of the whole."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        weights_RK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        slot_map: SlotMap,
        ops: OpSet,
        keep: Keep,
        halves: list[Half],
    ) -> Tensor:
        hidden_SF, weights_S = keep(lambda: mlp_up(ops, rows_RD, weights_RK, slot_map, gate_up))
        ctx.save_for_backward(rows_RD, hidden_SF, weights_S, gate_up, down)
        ctx.slot_map, ctx.ops, ctx.weights_dtype = slot_map, ops, weights_RK.dtype
        halves.append(Half(hidden_SF, weights_S, down, slot_map, ops))
        return stand_in(rows_RD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        need_rows, need_routing, *need_weights = ctx.needs_input_grad[:4]
        saved = ctx.saved_tensors  # read once: checkpointing allows no second look
        rows_RD = saved[0]
        rows_gradient, routing_gradient = None, None
        if need_rows or need_routing:
            rows_gradient = torch.empty(rows_RD.shape, dtype=rows_RD.dtype, device=rows_RD.device)
            routing_gradient = torch.empty(ctx.slot_map.slots_RK.shape, dtype=ctx.weights_dtype, device=rows_RD.device)
        weights = mlp_backward(
            ctx.ops,
            gradients[0],
            saved,
            ctx.slot_map,
            tuple(need_weights),
            rows_gradient,
            routing_gradient,
        )
        return rows_gradient, routing_gradient, *weights, None, None, None, None


def expert_mlp(
    rows_RD: Tensor,
    weights_RK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    slot_map: SlotMap,
    ops: OpSet,
    keep: Keep = keep_nothing,
) -> Tensor:
    """Weighted sum over each row's experts: ``out[r] = sum_k weights[r, k] * y_e(rows[r])``.

    Args:
        rows_RD: bf16 or float32 ``[R, D]``; rows may be strided, elements of a row are adjacent.
        weights_RK: routing weights ``[R, K]``, any float dtype; read where ``slot_map.slots_RK >= 0``.
        gate_up: ``[L, 2F, D]``, gate rows first. down: ``[L, D, F]``. Both in the dtype of the rows.
        slot_map: which slots each row has; slots are sorted by expert.
        ops: operators of the device, from ``ops.get_ops``.
        keep: makes ``(h, weights)`` by the function it is given, or has them from the forward that is recomputed.

    Returns:
        ``[R, D]``, differentiable in the first four. Without slots the weights' gradients are zeros, not None.
    """
    halves: list[Half] = []
    gradient_only = _Up.apply(rows_RD, weights_RK.contiguous(), gate_up, down, slot_map, ops, keep, halves)
    return mlp_down(gradient_only, halves)
