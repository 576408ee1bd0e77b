"""Permute, unpermute and weighted SwiGLU with gradients, one autograd function each.

For experts that need their own forward; plain SwiGLU experts run ``expert_mlp.py``, which keeps less. Letters as in
``ops/table.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.ops.expert_mlp import SlotMap
from hf_fsdpturbo.ops.table import OpSet
from hf_fsdpturbo.ops.torch import accumulation_dtype


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_RK: Tensor | None, slot_map: SlotMap, ops: OpSet) -> Any:
        ctx.slot_map, ctx.ops, ctx.shape = slot_map, ops, rows_RD.shape
        ctx.weights_dtype = None if weights_RK is None else weights_RK.dtype
        out_SD = rows_RD.new_empty(slot_map.num_slots, rows_RD.shape[1])
        weights_S = None
        if weights_RK is not None:
            weights_S = torch.empty(
                slot_map.num_slots, dtype=accumulation_dtype(weights_RK.dtype), device=rows_RD.device
            )
        ops.scatter_rows(rows_RD, slot_map.slots_RK, out_SD, weights_RK, weights_S)
        return out_SD, weights_S

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        rows_gradient_SD, weights_gradient_S = gradients
        assert rows_gradient_SD is not None  # autograd materialises zeros
        slots_RK = ctx.slot_map.slots_RK
        out_RD = rows_gradient_SD.new_empty(ctx.shape)
        out_RK = None
        if ctx.weights_dtype is not None:
            out_RK = torch.empty(slots_RK.shape, dtype=ctx.weights_dtype, device=slots_RK.device)
        ctx.ops.gather_sum(rows_gradient_SD.contiguous(), slots_RK, out_RD, weights_gradient_S, out_RK)
        return out_RD, out_RK, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, slot_map: SlotMap, ops: OpSet) -> Tensor:
        ctx.slot_map, ctx.ops = slot_map, ops
        out_RD = rows_SD.new_empty(slot_map.slots_RK.shape[0], rows_SD.shape[1])
        ops.gather_sum(rows_SD.contiguous(), slot_map.slots_RK, out_RD)
        return out_RD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        out_SD = gradients[0].new_empty(ctx.slot_map.num_slots, gradients[0].shape[1])
        ctx.ops.scatter_rows(gradients[0].contiguous(), ctx.slot_map.slots_RK, out_SD)
        return out_SD, None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_SF: Tensor, weights_S: Tensor | None, ops: OpSet) -> Tensor:
        ctx.save_for_backward(gate_up_SF, weights_S)
        ctx.ops = ops
        return ops.swiglu(gate_up_SF, weights_S)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_SF, weights_S = ctx.saved_tensors
        gate_up, weights, _ = ctx.ops.swiglu_backward(gate_up_SF, weights_S, gradients[0].contiguous())
        return gate_up, None if weights_S is None else weights.to(weights_S.dtype), None


def permute(
    rows_RD: Tensor, slot_map: SlotMap, ops: OpSet, weights_RK: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``(rows [S, D], weights [S] or None)`` in slot order; weights come in float32 (float64 for float64)."""
    return _Permute.apply(rows_RD, weights_RK, slot_map, ops)


def unpermute(rows_SD: Tensor, slot_map: SlotMap, ops: OpSet, weights_S: Tensor | None = None) -> Tensor:
    """``[S, D]`` -> ``[R, D]``: sum over each row's slots, times ``weights_S`` if given."""
    if weights_S is not None:
        rows_SD = (rows_SD * weights_S.unsqueeze(-1)).to(rows_SD.dtype)
    return _Unpermute.apply(rows_SD, slot_map, ops)


def swiglu(gate_up_SF: Tensor, ops: OpSet, weights_S: Tensor | None = None) -> Tensor:
    """``silu(gate) * up * weight`` of ``[S, 2F]``, gate first -> ``[S, F]``."""
    return _Swiglu.apply(gate_up_SF, weights_S, ops)
