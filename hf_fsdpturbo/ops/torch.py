"""The operators in plain PyTorch: what CPU runs, and what the other files are compared with.

Letters as in ``ops/table.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_fsdpturbo import compat
from hf_fsdpturbo.ops.adamw import adamw_, square_sum
from hf_fsdpturbo.ops.router_load import router_load, router_load_backward
from hf_fsdpturbo.ops.table import LogitTransform, Routing

__all__ = [
    "accumulation_dtype",
    "adamw_",
    "add_product_",
    "count_routing",
    "cross_entropy_",
    "gather_sum",
    "grouped_mm",
    "own_slots",
    "router_load",
    "router_load_backward",
    "scale_",
    "scatter_rows",
    "slot_pairs",
    "square_sum",
    "supports",
    "swiglu",
    "swiglu_backward",
    "write_pairs",
]

_LOGITS_AT_ONCE = 2**22  # 16 MiB a tensor in float32: a few of them fit a CPU's cache, or little of an NPU's memory


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def count_routing(index_TK: Tensor, num_experts: int, ep_size: int) -> Routing:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    tokens, top_k = index_TK.shape
    expert_N = index_TK.reshape(-1).long()
    counts_E = torch.zeros(num_experts, dtype=torch.long, device=index_TK.device)
    counts_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))
    order_N = torch.argsort(expert_N, stable=True)
    start_E = counts_E.cumsum(0) - counts_E
    rank_N = torch.empty_like(expert_N)
    rank_N[order_N] = torch.arange(expert_N.numel(), device=index_TK.device) - start_E[expert_N[order_N]]

    owner_TK = index_TK.long() // (num_experts // ep_size)
    sent_TP = torch.zeros(tokens, ep_size, dtype=torch.long, device=index_TK.device).scatter_(1, owner_TK, 1)
    rows_P = sent_TP.sum(0)
    row_TP = sent_TP.cumsum(0) - 1 + (rows_P.cumsum(0) - rows_P)
    pair_row_TK = row_TP.gather(1, owner_TK)
    again_TK = (owner_TK.unsqueeze(2) == owner_TK.unsqueeze(1)).tril(-1).any(2)
    row_position_TK = pair_row_TK.masked_fill(again_TK, -1)
    return Routing(
        index_TK,
        rank_N.view(tokens, top_k).int(),
        pair_row_TK.int(),
        row_position_TK.int(),
        torch.cat([counts_E, rows_P]).int(),
    )


def slot_pairs(routing: Routing, totals_PX: Tensor, ep_rank: int) -> tuple[Tensor, Tensor]:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    ep_size = totals_PX.shape[0]
    pairs_PE = totals_PX[:, : totals_PX.shape[1] - ep_size].long()
    pairs_PL = pairs_PE.sum(0).view(ep_size, -1)
    ends_PL = pairs_PL.cumsum(1)
    start_E = (ends_PL - pairs_PL).reshape(-1) + pairs_PE[:ep_rank].sum(0)
    slots_TK = start_E[routing.index_TK.long()] + routing.rank_TK
    return slots_TK.int(), ends_PL[ep_rank].int()


def own_slots(index_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    routing = count_routing(index_TK, num_experts, 1)
    return slot_pairs(routing, routing.totals_X.unsqueeze(0), 0)


def write_pairs(
    routing: Routing, slots_TK: Tensor, weights_TK: Tensor, out_slots: Tensor, out_weights: Tensor
) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    row_TK = routing.pair_row_TK
    mine_TKK = row_TK.unsqueeze(2) == row_TK.unsqueeze(1)  # [token, first pair of a row, pair]
    first_TK = routing.row_position_TK >= 0
    rows = routing.row_position_TK[first_TK].long()
    out_slots[rows] = slots_TK.unsqueeze(1).expand_as(mine_TKK).masked_fill(~mine_TKK, -1)[first_TK]
    weights_TKK = weights_TK.to(out_weights.dtype).unsqueeze(1).expand_as(mine_TKK)
    out_weights[rows] = weights_TKK.masked_fill(~mine_TKK, 0)[first_TK]


def scatter_rows(
    rows_RD: Tensor,
    slots_RK: Tensor,
    out_SD: Tensor,
    weights_RK: Tensor | None = None,
    out_weights_S: Tensor | None = None,
    *,
    roomy: bool = False,
) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    row, k = (slots_RK >= 0).nonzero(as_tuple=True)
    slot = slots_RK[row, k].long()
    out_SD[slot] = rows_RD[row]
    if weights_RK is not None and out_weights_S is not None:
        out_weights_S[slot] = weights_RK[row, k].to(out_weights_S.dtype)


def gather_sum(
    rows_SD: Tensor,
    slots_RK: Tensor,
    out_RD: Tensor,
    values_S: Tensor | None = None,
    out_values_RK: Tensor | None = None,
) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    row, k = (slots_RK >= 0).nonzero(as_tuple=True)
    slot = slots_RK[row, k].long()
    dtype = accumulation_dtype(rows_SD.dtype)
    out_RD.copy_(torch.zeros_like(out_RD, dtype=dtype).index_add_(0, row, rows_SD[slot].to(dtype)))
    if values_S is not None and out_values_RK is not None:
        out_values_RK.zero_()
        out_values_RK[row, k] = values_S[slot].to(out_values_RK.dtype)


def grouped_mm(left: Tensor, right: Tensor, offsets_L: Tensor) -> Tensor:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    if right.shape[0] == 0 and right.ndim == 2:  # 2D x 2D without rows
        return left.new_zeros(offsets_L.numel(), left.shape[0], right.shape[1])
    if left.shape[0] == 0 and left.ndim == 2 and right.ndim == 3:
        return left.new_zeros(0, right.shape[2])
    return compat.grouped_mm()(left, right, offs=offsets_L)


def supports(gate_up: Tensor, down: Tensor) -> bool:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    fast_dtype = gate_up.dtype in (torch.float32, torch.bfloat16, torch.float16)
    aligned = all(size * gate_up.element_size() % 16 == 0 for size in (*gate_up.shape[1:], *down.shape[1:]))
    return compat.has_cpu_grouped_mm() and fast_dtype and aligned and gate_up.dtype == down.dtype


def swiglu(gate_up_SF: Tensor, weights_S: Tensor | None) -> Tensor:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    gate, up = gate_up_SF.to(accumulation_dtype(gate_up_SF.dtype)).chunk(2, dim=-1)
    output = torch.nn.functional.silu(gate) * up
    if weights_S is not None:
        output = output * weights_S.unsqueeze(-1)
    return output.to(gate_up_SF.dtype)


def swiglu_backward(
    gate_up_SF: Tensor, weights_S: Tensor | None, gradient_SF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    dtype = accumulation_dtype(gate_up_SF.dtype)
    gate, up = gate_up_SF.to(dtype).chunk(2, dim=-1)
    gradient = gradient_SF.to(dtype)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    output = silu * up
    weights_gradient_S = (gradient * output).sum(-1)
    if weights_S is not None:
        gradient = gradient * weights_S.unsqueeze(-1)
        output = output * weights_S.unsqueeze(-1)
    gate_gradient = gradient * up * (sigmoid + silu * (1 - sigmoid))
    gate_up_gradient = torch.cat([gate_gradient, gradient * silu], dim=-1)
    return gate_up_gradient.to(gate_up_SF.dtype), weights_gradient_S, output.to(gate_up_SF.dtype)


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    if tensors:
        torch._foreach_mul_(tensors, factor.to(tensors[0].device))


def cross_entropy_(logits_NV: Tensor, targets_N: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    rows = max(1, _LOGITS_AT_ONCE // max(1, logits_NV.shape[1]))
    parts = zip(logits_NV.split(rows), targets_N.split(rows), strict=True)
    found = [_cross_entropy_rows_(*part, transform) for part in parts]
    log_probs, entropy, is_top1 = (torch.cat(each) for each in zip(*found, strict=True))
    return log_probs, entropy, is_top1


def _cross_entropy_rows_(
    logits_NV: Tensor, targets_N: Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor, Tensor]:
    z_NV = logits_NV.to(accumulation_dtype(logits_NV.dtype)) * transform.scale
    tanh_NV = None
    if transform.softcap is not None:
        tanh_NV = torch.tanh(z_NV / transform.softcap)
        z_NV = tanh_NV * transform.softcap
    if transform.temperature != 1:
        z_NV = z_NV / transform.temperature
    targets_N1 = targets_N.unsqueeze(1)
    is_top1_N = z_NV.argmax(1) == targets_N  # argmax gives the first of equals
    log_p_NV = z_NV.log_softmax(1)
    log_probs_N = log_p_NV.gather(1, targets_N1).squeeze(1)
    p_NV = log_p_NV.exp()
    entropy_N = -(p_NV * log_p_NV).sum(1)
    gradient_NV = p_NV.neg_().scatter_add_(1, targets_N1, torch.ones_like(targets_N1, dtype=p_NV.dtype))
    if tanh_NV is not None:
        gradient_NV *= 1 - tanh_NV**2
    logits_NV.copy_(gradient_NV * (transform.scale / transform.temperature))
    return log_probs_N, entropy_N, is_top1_N


def add_product_(sum_AB: Tensor, left_AN: Tensor, right_NB: Tensor, *, fresh: bool = False) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`. With ``beta`` 0 torch does not read what is there, NaN included."""
    sum_AB.addmm_(left_AN.to(sum_AB.dtype), right_NB.to(sum_AB.dtype), beta=0 if fresh else 1)
