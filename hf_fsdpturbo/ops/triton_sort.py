"""Index work of a dispatch in Triton: counting sort of pairs by expert, their slots, and the pairs of received rows.

Runs under ``TRITON_INTERPRET=1`` with CPU tensors, as ``ops/triton.py``. Letters as in ``ops/table.py``;
NB blocks of TB tokens in the counting sort.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_fsdpturbo.ops.table import Routing

_PAIRS_PER_BLOCK = 128  # the pair-by-pair comparison of a block fits in registers

# Note [Counting sort]
# A block compares its pairs with each other (128 x 128), which gives each pair its rank among the block's pairs of the
# same expert; the last of each kind writes the block's count. One cumulative sum over blocks makes the ranks global.
# Stable, hence deterministic, and free of atomics. A block first writes zeros for all experts. Rows per destination
# rank are counted token by token, each token once a destination (comparing all pairs of a block for it took ten times
# as long); a row rank is stored as -1 - rank for pairs that are not the first of their row.


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _count_kernel(
    index_ptr, rank_ptr, count_ptr, num_pairs, num_experts, num_blocks, PAIRS: tl.constexpr, B: tl.constexpr,
    EB: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    lane = tl.arange(0, B)
    any_expert = tl.arange(0, EB)
    tl.store(count_ptr + any_expert * num_blocks + block, 0, mask=any_expert < num_experts)
    tl.debug_barrier()  # every thread's zeros are there before one of them writes a count
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


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _own_slot_kernel(
    index_ptr, cumulative_ptr, rank_ptr, slot_ptr, offset_ptr, num_pairs, num_blocks,
    PAIRS: tl.constexpr, E: tl.constexpr, EB: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EB)
    total = tl.load(cumulative_ptr + expert * num_blocks + num_blocks - 1, mask=expert < E, other=0)
    end = tl.cumsum(total, 0)
    if tl.program_id(0) == 0:
        tl.store(offset_ptr + expert, end, mask=expert < E)
    pair = tl.program_id(0) * B + tl.arange(0, B)
    valid = pair < num_pairs
    block = pair // PAIRS
    mine = tl.load(index_ptr + pair, mask=valid, other=0).to(tl.int32)
    start = tl.sum(tl.where(mine[:, None] == expert[None, :], (end - total)[None, :], 0), 1)
    before = tl.load(cumulative_ptr + mine * num_blocks + block - 1, mask=valid & (block > 0), other=0)
    tl.store(slot_ptr + pair, start + before + tl.load(rank_ptr + pair, mask=valid, other=0), mask=valid)


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


def _count(index_TK: Tensor, num_experts: int, rows: int, rank: Tensor) -> tuple[Tensor, int]:
    """Writes each pair's rank in its block. Gives ``[rows, NB]``, of which E are counts, and the pairs of a block."""
    tokens, top_k = index_TK.shape
    pairs_per_block = max(1, _PAIRS_PER_BLOCK // top_k) * top_k
    num_blocks = max(1, triton.cdiv(tokens * top_k, pairs_per_block))
    new = torch.empty if tokens else torch.zeros
    count = new((rows, num_blocks), dtype=torch.int32, device=index_TK.device)
    if tokens:
        _count_kernel[(num_blocks,)](
            index_TK, rank, count, tokens * top_k, num_experts, num_blocks, PAIRS=pairs_per_block,
            B=triton.next_power_of_2(pairs_per_block), EB=triton.next_power_of_2(num_experts), num_warps=8,
        )  # fmt: skip
    return count, pairs_per_block


def count_routing(index_TK: Tensor, num_experts: int, ep_size: int) -> Routing:
    """See :class:`hf_fsdpturbo.ops.table.OpSet` and Note [Counting sort]. Four launches."""
    tokens, top_k = index_TK.shape
    index_TK = index_TK.contiguous()
    num_pairs, num_local = tokens * top_k, num_experts // ep_size
    rank, row, position = torch.empty((3, tokens, top_k), dtype=torch.int32, device=index_TK.device).unbind(0)
    count, pairs_per_block = _count(index_TK, num_experts, num_experts + ep_size, rank)
    num_blocks = count.shape[1]
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


def own_slots(index_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`. Three launches."""
    index_TK = index_TK.contiguous()
    rank, slots = torch.empty((2, *index_TK.shape), dtype=torch.int32, device=index_TK.device).unbind(0)
    count, pairs_per_block = _count(index_TK, num_experts, num_experts, rank)
    cumulative = count.cumsum(1, dtype=torch.int32)
    offsets = torch.empty(num_experts, dtype=torch.int32, device=index_TK.device)
    width = triton.next_power_of_2(num_experts)
    pairs = max(16, 8192 // width)
    _own_slot_kernel[(max(1, triton.cdiv(slots.numel(), pairs)),)](
        index_TK, cumulative, rank, slots, offsets, slots.numel(), count.shape[1],
        PAIRS=pairs_per_block, E=num_experts, EB=width, B=pairs,
    )  # fmt: skip
    return slots, offsets


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
