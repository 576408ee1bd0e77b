"""Copies of rows in Triton: each row to its slots, and the sum of the rows in its slots.

Runs under ``TRITON_INTERPRET=1`` with CPU tensors, as ``ops/triton.py``. Letters as in ``ops/table.py``.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_UNROLL_LIMIT = 16  # K up to which copies of a row are issued together
# Shape of a program; benchmarks/kernel_sweep.py tries others.
_ROW_BLOCK, _ROW_WARPS = 2048, 8  # elements of a row that a copy kernel moves at once: 16 bytes a thread in bf16


@triton.jit
def _scatter_kernel(
    rows_ptr, slot_ptr, out_ptr, weight_ptr, out_weight_ptr, row_stride, slot_stride, out_stride, weight_stride, D,
    K: tl.constexpr, K2: tl.constexpr, B: tl.constexpr, UNROLL: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * B + tl.arange(0, B)
    valid = column < D
    value = tl.load(rows_ptr + row * row_stride + column, mask=valid, other=0.0)
    slots_ptr = slot_ptr + row * slot_stride
    if UNROLL:
        for k in tl.static_range(K):
            slot = tl.load(slots_ptr + k).to(tl.int64)
            tl.store(out_ptr + slot * out_stride + column, value, mask=valid & (slot >= 0))
    else:
        for k in range(K):
            slot = tl.load(slots_ptr + k).to(tl.int64)
            tl.store(out_ptr + slot * out_stride + column, value, mask=valid & (slot >= 0))
    if WEIGHTS:
        if tl.program_id(1) == 0:
            each = tl.arange(0, K2)  # not k: Triton keeps the type a name had in the loop above
            slots = tl.load(slots_ptr + each, mask=each < K, other=-1)
            weight = tl.load(weight_ptr + row * weight_stride + each, mask=each < K, other=0.0)
            tl.store(out_weight_ptr + slots, weight.to(out_weight_ptr.dtype.element_ty), mask=slots >= 0)


@triton.jit
def _gather_sum_kernel(
    rows_ptr, slot_ptr, out_ptr, value_ptr, out_value_ptr, row_stride, slot_stride, out_stride, value_stride, D,
    K: tl.constexpr, K2: tl.constexpr, B: tl.constexpr, UNROLL: tl.constexpr, VALUES: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * B + tl.arange(0, B)
    valid = column < D
    slots_ptr = slot_ptr + row * slot_stride
    total = tl.zeros((B,), ACC)
    if UNROLL:
        for k in tl.static_range(K):
            slot = tl.load(slots_ptr + k).to(tl.int64)
            total += tl.load(rows_ptr + slot * row_stride + column, mask=valid & (slot >= 0), other=0.0).to(ACC)
    else:
        for k in range(K):
            slot = tl.load(slots_ptr + k).to(tl.int64)
            total += tl.load(rows_ptr + slot * row_stride + column, mask=valid & (slot >= 0), other=0.0).to(ACC)
    tl.store(out_ptr + row * out_stride + column, total.to(out_ptr.dtype.element_ty), mask=valid)
    if VALUES:
        if tl.program_id(1) == 0:
            each = tl.arange(0, K2)  # not k: see the scatter kernel
            slots = tl.load(slots_ptr + each, mask=each < K, other=-1)
            value = tl.load(value_ptr + slots, mask=slots >= 0, other=0.0)
            out = out_value_ptr + row * value_stride + each
            tl.store(out, value.to(out_value_ptr.dtype.element_ty), mask=each < K)


def acc_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype that a kernel sums ``dtype`` in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def _row_launch(slots_RK: Tensor, width: int) -> tuple[tuple[int, int], dict[str, int | bool]]:
    """Grid and constants of the two copy kernels."""
    rows, top_k = slots_RK.shape
    block = min(triton.next_power_of_2(width), _ROW_BLOCK)
    constants = {"K": top_k, "K2": triton.next_power_of_2(top_k), "B": block, "UNROLL": top_k <= _UNROLL_LIMIT}
    warps = max(1, min(_ROW_WARPS, block * _ROW_WARPS // _ROW_BLOCK))
    return (rows, triton.cdiv(width, block)), {**constants, "num_warps": warps}


def scatter_rows(
    rows_RD: Tensor,
    slots_RK: Tensor,
    out_SD: Tensor,
    weights_RK: Tensor | None = None,
    out_weights_S: Tensor | None = None,
    *,
    roomy: bool = False,
) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`. Each row is read once and written to its slots."""
    if slots_RK.shape[0] == 0:
        return
    grid, constants = _row_launch(slots_RK, rows_RD.shape[1])
    weights = weights_RK if weights_RK is not None else rows_RD
    _scatter_kernel[grid](
        rows_RD, slots_RK, out_SD, weights, out_weights_S if out_weights_S is not None else rows_RD,
        rows_RD.stride(0), slots_RK.stride(0), out_SD.stride(0), weights.stride(0), rows_RD.shape[1],
        WEIGHTS=weights_RK is not None, **constants,
    )  # fmt: skip


def gather_sum(
    rows_SD: Tensor,
    slots_RK: Tensor,
    out_RD: Tensor,
    values_S: Tensor | None = None,
    out_values_RK: Tensor | None = None,
) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`. A row's loads are issued together."""
    if slots_RK.shape[0] == 0:
        return
    grid, constants = _row_launch(slots_RK, rows_SD.shape[1])
    out_values = out_values_RK if out_values_RK is not None else rows_SD
    _gather_sum_kernel[grid](
        rows_SD, slots_RK, out_RD, values_S if values_S is not None else rows_SD, out_values,
        rows_SD.stride(0), slots_RK.stride(0), out_RD.stride(0), out_values.stride(0), rows_SD.shape[1],
        VALUES=values_S is not None and out_values_RK is not None, ACC=acc_dtype(rows_SD.dtype), **constants,
    )  # fmt: skip
