"""The operators for CUDA: Triton kernels for index work, copies and SwiGLU, a library's grouped matmul for the rest.

The ``triton_*.py`` files and it alone import triton. No autotuning: block sizes follow from shapes, so the first step
compiles each kernel once. Runs under ``TRITON_INTERPRET=1`` with CPU tensors, which is how the unit tests check it.

Letters as in ``ops/table.py``; NB blocks of TB tokens in the counting sort.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_fsdpturbo.ops.quack import grouped_mm
from hf_fsdpturbo.ops.table import Routing
from hf_fsdpturbo.ops.torch import supports
from hf_fsdpturbo.ops.triton_adamw import adamw_, square_sum
from hf_fsdpturbo.ops.triton_cross_entropy import add_product_, cross_entropy_

__all__ = [
    "adamw_",
    "add_product_",
    "count_routing",
    "cross_entropy_",
    "gather_sum",
    "grouped_mm",
    "scale_",
    "scatter_rows",
    "slot_pairs",
    "square_sum",
    "supports",
    "swiglu",
    "swiglu_backward",
    "write_pairs",
]

_PAIRS_PER_BLOCK = 128  # the pair-by-pair comparison of a block fits in registers
_UNROLL_LIMIT = 16  # K up to which copies of a row are issued together
# Shapes of programs; benchmarks/kernel_sweep.py tries others.
_ROW_BLOCK, _ROW_WARPS = 2048, 8  # elements of a row that a copy kernel moves at once: 16 bytes a thread in bf16
_SWIGLU_ROWS, _SWIGLU_COLUMNS, _SWIGLU_WARPS = 4, 256, 4  # 256 columns are a warp's 16-byte loads

# Note [Counting sort]
# A block compares its pairs with each other (128 x 128), which gives each pair its rank among the block's pairs of the
# same expert; the last of each kind writes the block's count. One cumulative sum over blocks makes the ranks global.
# Stable, hence deterministic, and free of atomics. Rows per destination rank are counted token by token, each token
# once a destination (comparing all pairs of a block for it took ten times as long); a row rank is stored as -1 - rank
# for pairs that are not the first of their row.


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _count_kernel(
    index_ptr, rank_ptr, count_ptr, num_pairs, num_experts, num_blocks, PAIRS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    lane = tl.arange(0, B)
    pair = block * PAIRS + lane
    valid = (lane < PAIRS) & (pair < num_pairs)
    expert = tl.load(index_ptr + pair, mask=valid, other=num_experts).to(tl.int32)
    earlier = lane[None, :] < lane[:, None]
    later = lane[None, :] > lane[:, None]
    same = expert[:, None] == expert[None, :]
    rank = tl.sum((same & earlier).to(tl.int32), 1)
    last = tl.sum((same & later).to(tl.int32), 1) == 0
    tl.store(rank_ptr + pair, rank, mask=valid)
    tl.store(count_ptr + expert * num_blocks + block, rank + 1, mask=valid & last)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _row_kernel(
    index_ptr, row_ptr, count_ptr, num_tokens, num_local, num_experts, num_blocks,
    TOKENS: tl.constexpr, TB: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, P: tl.constexpr, P2: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    lane, k, p = tl.arange(0, TB), tl.arange(0, K2), tl.arange(0, P2)
    token = block * TOKENS + lane
    valid = ((lane < TOKENS) & (token < num_tokens))[:, None] & (k < K)[None, :]
    pair = token[:, None] * K + k[None, :]
    expert = tl.load(index_ptr + pair, mask=valid, other=0).to(tl.int32)
    owner = tl.where(valid, expert // num_local, P2)
    again = (owner[:, :, None] == owner[:, None, :]) & (k[None, :] < k[:, None])[None, :, :]
    first = tl.sum(again.to(tl.int32), 2) == 0
    owned = owner[:, :, None] == p[None, None, :]
    hit = tl.max(owned.to(tl.int32), 1)
    before = tl.cumsum(hit, 0) - hit
    row = tl.sum(tl.where(owned, before[:, None, :], 0), 2)
    tl.store(row_ptr + pair, tl.where(first, row, -1 - row), mask=valid)
    tl.store(count_ptr + (num_experts + p) * num_blocks + block, tl.sum(hit, 0), mask=p < P)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place_kernel(
    index_ptr, cumulative_ptr, rank_ptr, row_ptr, position_ptr, num_pairs, num_local, num_experts, num_blocks,
    PAIRS: tl.constexpr, P: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * B + tl.arange(0, B)
    valid = pair < num_pairs
    block = pair // PAIRS
    expert = tl.load(index_ptr + pair, mask=valid, other=0).to(tl.int32)
    inner = valid & (block > 0)
    before = tl.load(cumulative_ptr + expert * num_blocks + block - 1, mask=inner, other=0)
    tl.store(rank_ptr + pair, tl.load(rank_ptr + pair, mask=valid, other=0) + before, mask=valid)
    if P > 1:
        owner = expert // num_local
        code = tl.load(row_ptr + pair, mask=valid, other=0)
        first = code >= 0
        row = tl.where(first, code, -1 - code)
        row += tl.load(cumulative_ptr + (num_experts + owner) * num_blocks + block - 1, mask=inner, other=0)
        for p in range(P - 1):
            rows = tl.load(cumulative_ptr + (num_experts + p) * num_blocks + num_blocks - 1)
            row += tl.where(p < owner, rows, 0)
        tl.store(row_ptr + pair, row, mask=valid)
        tl.store(position_ptr + pair, tl.where(first, row, -1), mask=valid)


@triton.jit(do_not_specialize=["ep_rank"])
def _start_kernel(totals_ptr, start_ptr, offset_ptr, stride, ep_rank, num_local,
                  P: tl.constexpr, P2: tl.constexpr, L2: tl.constexpr):  # fmt: skip
    owner = tl.arange(0, P2)
    local = tl.arange(0, L2)
    expert = owner[:, None] * num_local + local[None, :]
    valid = (owner[:, None] < P) & (local[None, :] < num_local)
    total = tl.zeros((P2, L2), tl.int32)
    earlier = tl.zeros((P2, L2), tl.int32)
    for p in range(P):
        pairs = tl.load(totals_ptr + p * stride + expert, mask=valid, other=0)
        total += pairs
        earlier += tl.where(p < ep_rank, pairs, 0)
    end = tl.cumsum(total, 1)
    tl.store(start_ptr + expert, end - total + earlier, mask=valid)
    mine = valid & (owner[:, None] == ep_rank)
    tl.store(offset_ptr + local[None, :] + owner[:, None] * 0, end, mask=mine)


@triton.jit(do_not_specialize=["num_pairs"])
def _slot_kernel(index_ptr, rank_ptr, start_ptr, slot_ptr, num_pairs, B: tl.constexpr):
    pair = tl.program_id(0) * B + tl.arange(0, B)
    valid = pair < num_pairs
    expert = tl.load(index_ptr + pair, mask=valid, other=0)
    start = tl.load(start_ptr + expert, mask=valid, other=0)
    tl.store(slot_ptr + pair, start + tl.load(rank_ptr + pair, mask=valid, other=0), mask=valid)


@triton.jit(do_not_specialize=["num_tokens"])
def _write_pairs_kernel(
    slot_ptr, weight_ptr, row_ptr, position_ptr, out_slot_ptr, out_weight_ptr, num_tokens, slot_stride, weight_stride,
    K: tl.constexpr, K2: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * B + tl.arange(0, B)
    k = tl.arange(0, K2)
    pair = token[:, None] * K + k[None, :]
    valid = (token[:, None] < num_tokens) & (k[None, :] < K)
    slot = tl.load(slot_ptr + pair, mask=valid, other=-1)
    weight = tl.load(weight_ptr + pair, mask=valid, other=0.0)
    row = tl.load(row_ptr + pair, mask=valid, other=-1)
    for first in range(K):
        position = tl.load(position_ptr + token * K + first, mask=token < num_tokens, other=-1).to(tl.int64)
        mine = row == position[:, None]
        store = valid & (position[:, None] >= 0)
        tl.store(out_slot_ptr + position[:, None] * slot_stride + k[None, :], tl.where(mine, slot, -1), mask=store)
        out = out_weight_ptr + position[:, None] * weight_stride + k[None, :]
        tl.store(out, tl.where(mine, weight, 0.0).to(out_weight_ptr.dtype.element_ty), mask=store)


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


@triton.jit(do_not_specialize=["S"])
def _swiglu_kernel(gate_ptr, weight_ptr, out_ptr, S, F: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
                   WEIGHTS: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside = row < S
    scale = tl.full((R,), 1.0, ACC)
    if WEIGHTS:
        scale = tl.load(weight_ptr + row, mask=inside, other=0.0).to(ACC)
    for start in range(0, F, B):
        column = start + tl.arange(0, B)
        valid = inside[:, None] & (column[None, :] < F)
        at = row[:, None] * (2 * F) + column[None, :]
        gate = tl.load(gate_ptr + at, mask=valid, other=0.0).to(ACC)
        up = tl.load(gate_ptr + at + F, mask=valid, other=0.0).to(ACC)
        out = gate * (1.0 / (1.0 + tl.exp(-gate))) * up * scale[:, None]
        tl.store(out_ptr + row[:, None] * F + column[None, :], out.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["S"])
def _swiglu_backward_kernel(
    gate_ptr, weight_ptr, gradient_ptr, out_gradient_ptr, out_weight_ptr, out_ptr, S,
    F: tl.constexpr, R: tl.constexpr, B: tl.constexpr, WEIGHTS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside = row < S
    scale = tl.full((R,), 1.0, ACC)
    if WEIGHTS:
        scale = tl.load(weight_ptr + row, mask=inside, other=0.0).to(ACC)
    weight_gradient = tl.zeros((R,), ACC)
    for start in range(0, F, B):
        column = start + tl.arange(0, B)
        valid = inside[:, None] & (column[None, :] < F)
        at = row[:, None] * (2 * F) + column[None, :]
        narrow = row[:, None] * F + column[None, :]
        gate = tl.load(gate_ptr + at, mask=valid, other=0.0).to(ACC)
        up = tl.load(gate_ptr + at + F, mask=valid, other=0.0).to(ACC)
        gradient = tl.load(gradient_ptr + narrow, mask=valid, other=0.0).to(ACC)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        out = silu * up
        weight_gradient += tl.sum(gradient * out, 1)
        gradient = gradient * scale[:, None]
        tl.store(out_ptr + narrow, (out * scale[:, None]).to(out_ptr.dtype.element_ty), mask=valid)
        gate_gradient = gradient * up * (sigmoid + silu * (1.0 - sigmoid))
        element = out_gradient_ptr.dtype.element_ty
        tl.store(out_gradient_ptr + at, gate_gradient.to(element), mask=valid)
        tl.store(out_gradient_ptr + at + F, (gradient * silu).to(element), mask=valid)
    tl.store(out_weight_ptr + row, weight_gradient, mask=inside)


@triton.jit
def _scale_kernel(tensor_ptr, factor_ptr, count, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    value = tl.load(tensor_ptr + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(factor_ptr)
    tl.store(tensor_ptr + at, value.to(tensor_ptr.dtype.element_ty), mask=at < count)


def _acc(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def count_routing(index_TK: Tensor, num_experts: int, ep_size: int) -> Routing:
    """See :class:`hf_fsdpturbo.ops.table.OpSet` and Note [Counting sort]. Four launches."""
    tokens, top_k = index_TK.shape
    index_TK = index_TK.contiguous()
    num_pairs, num_local = tokens * top_k, num_experts // ep_size
    pairs_per_block = max(1, _PAIRS_PER_BLOCK // top_k) * top_k
    num_blocks = max(1, triton.cdiv(num_pairs, pairs_per_block))
    rank, row, position = torch.empty((3, tokens, top_k), dtype=torch.int32, device=index_TK.device).unbind(0)
    count = torch.zeros((num_experts + ep_size, num_blocks), dtype=torch.int32, device=index_TK.device)
    if num_pairs:
        _count_kernel[(num_blocks,)](
            index_TK, rank, count, num_pairs, num_experts, num_blocks,
            PAIRS=pairs_per_block, B=triton.next_power_of_2(pairs_per_block), num_warps=8,
        )  # fmt: skip
    if num_pairs and ep_size > 1:
        _row_kernel[(num_blocks,)](
            index_TK, row, count, tokens, num_local, num_experts, num_blocks,
            TOKENS=pairs_per_block // top_k, TB=triton.next_power_of_2(pairs_per_block // top_k),
            K=top_k, K2=triton.next_power_of_2(top_k), P=ep_size, P2=triton.next_power_of_2(ep_size),
        )  # fmt: skip
    cumulative = count.cumsum(1, dtype=torch.int32)
    if num_pairs:
        _place_kernel[(triton.cdiv(num_pairs, 512),)](
            index_TK, cumulative, rank, row, position, num_pairs, num_local, num_experts, num_blocks,
            PAIRS=pairs_per_block, P=ep_size, B=512,
        )  # fmt: skip
    return Routing(index_TK, rank, row, position, cumulative[:, -1])


def slot_pairs(routing: Routing, totals_PX: Tensor, ep_rank: int) -> tuple[Tensor, Tensor]:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`. Two launches."""
    totals_PX = totals_PX.contiguous()
    ep_size, width = totals_PX.shape
    num_experts = width - ep_size
    num_local = num_experts // ep_size
    start = torch.empty(num_experts, dtype=torch.int32, device=totals_PX.device)
    offsets = torch.empty(num_local, dtype=torch.int32, device=totals_PX.device)
    _start_kernel[(1,)](
        totals_PX, start, offsets, width, ep_rank, num_local,
        P=ep_size, P2=triton.next_power_of_2(ep_size), L2=triton.next_power_of_2(num_local),
    )  # fmt: skip
    slots = torch.empty_like(routing.rank_TK)
    if slots.numel():
        grid = (triton.cdiv(slots.numel(), 512),)
        _slot_kernel[grid](routing.index_TK, routing.rank_TK, start, slots, slots.numel(), B=512)
    return slots, offsets


def write_pairs(
    routing: Routing, slots_TK: Tensor, weights_TK: Tensor, out_slots: Tensor, out_weights: Tensor
) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    tokens, top_k = slots_TK.shape
    if tokens:
        _write_pairs_kernel[(triton.cdiv(tokens, 32),)](
            slots_TK, weights_TK.contiguous(), routing.pair_row_TK, routing.row_position_TK, out_slots, out_weights,
            tokens, out_slots.stride(0), out_weights.stride(0), K=top_k, K2=triton.next_power_of_2(top_k), B=32,
        )  # fmt: skip


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
        VALUES=values_S is not None and out_values_RK is not None, ACC=_acc(rows_SD.dtype), **constants,
    )  # fmt: skip


def _swiglu_launch(slots: int, ffn: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and constants of the SwiGLU kernels: a program takes a few whole rows."""
    columns = min(_SWIGLU_COLUMNS, triton.next_power_of_2(ffn))
    constants = {"F": ffn, "R": _SWIGLU_ROWS, "B": columns, "num_warps": _SWIGLU_WARPS}
    return (triton.cdiv(slots, _SWIGLU_ROWS),), constants


def swiglu(gate_up_SF: Tensor, weights_S: Tensor | None) -> Tensor:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    slots, ffn = gate_up_SF.shape[0], gate_up_SF.shape[1] // 2
    out = gate_up_SF.new_empty(slots, ffn)
    if slots:
        grid, constants = _swiglu_launch(slots, ffn)
        _swiglu_kernel[grid](
            gate_up_SF, weights_S if weights_S is not None else out, out, slots,
            WEIGHTS=weights_S is not None, ACC=_acc(out.dtype), **constants,
        )  # fmt: skip
    return out


def swiglu_backward(
    gate_up_SF: Tensor, weights_S: Tensor | None, gradient_SF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`. One pass: both gradients and the forward's output again."""
    slots, ffn = gradient_SF.shape
    gate_up_gradient, out = torch.empty_like(gate_up_SF), torch.empty_like(gradient_SF)
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    weights_gradient = torch.empty(slots, dtype=dtype, device=out.device)
    if slots:
        grid, constants = _swiglu_launch(slots, ffn)
        _swiglu_backward_kernel[grid](
            gate_up_SF, weights_S if weights_S is not None else weights_gradient, gradient_SF, gate_up_gradient,
            weights_gradient, out, slots,
            WEIGHTS=weights_S is not None, ACC=_acc(out.dtype), **constants,
        )  # fmt: skip
    return gate_up_gradient, weights_gradient, out


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`.

    torch's foreach multiplies bf16 tensors by a float32 scalar tensor one by one and unvectorised: 11 ms a step for
    2.8 B gradients on an H200, four times what their bytes cost.
    """
    factor = factor.float()
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.dtype in (torch.bfloat16, torch.float16, torch.float32):
            if tensor.numel():
                _scale_kernel[(triton.cdiv(tensor.numel(), 4096),)](
                    tensor, factor, tensor.numel(), B=4096, num_warps=8
                )
        else:
            tensor.mul_(factor)
