"""All calls of torch_npu, which is imported late and only here; written from its schemas, never run on the hardware.

Index work is plain PyTorch (``ops/torch.py``); permute, unpermute, grouped matmul and SwiGLU are torch_npu's. The two
MC2 operators at the end move rows and multiply in one. Letters as in ``ops/table.py``.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_fsdpturbo.compat import require
from hf_fsdpturbo.ops.torch import (
    accumulation_dtype,
    adamw_,
    add_product_,
    count_routing,
    cross_entropy_,
    own_slots,
    router_load,
    router_load_backward,
    scale_,
    slot_pairs,
    square_sum,
    swiglu_backward,
    write_pairs,
)

__all__ = [
    "adamw_",
    "add_product_",
    "alltoallv_grouped_mm",
    "count_routing",
    "cross_entropy_",
    "device_name",
    "gather_sum",
    "grouped_mm",
    "grouped_mm_alltoallv",
    "hccl_name",
    "load_torch_npu",
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


def load_torch_npu() -> ModuleType:
    """torch_npu, imported now.

    Raises:
        MissingDependencyError: (a ValueError) it is not installed.
    """
    require("torch_npu", "the Ascend NPU path")
    return importlib.import_module("torch_npu")


def device_name() -> str:
    """Name of the current NPU; Atlas A3 devices are called Ascend910_93.."""
    return str(load_torch_npu().npu.get_device_name())


def hccl_name(group: ProcessGroup) -> str:
    """Name of the HCCL communicator of a group, as MC2 operators want it."""
    backend: Any = group._get_backend(torch.device("npu"))
    return str(backend.get_hccl_comm_name(torch.distributed.get_rank()))


def scatter_rows(
    rows_RD: Tensor,
    slots_RK: Tensor,
    out_SD: Tensor,
    weights_RK: Tensor | None = None,
    out_weights_S: Tensor | None = None,
    *,
    roomy: bool = False,
) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`.

    Full maps (K slots a row) are one operator, others K scatters; no host sync. As many slots as entries mean a full
    map only where every row of ``out`` is a slot.
    """
    num_slots = out_SD.shape[0]
    if not roomy and slots_RK.numel() == num_slots:
        out_SD.copy_(load_torch_npu().npu_moe_token_permute(rows_RD, slots_RK)[0])
    else:
        wide = out_SD.new_empty(num_slots + 1, out_SD.shape[1])  # the last row takes what has no slot
        for slot_R in _or_last(slots_RK, num_slots).unbind(1):
            wide.index_copy_(0, slot_R, rows_RD)
        out_SD.copy_(wide[:num_slots])
    if weights_RK is not None and out_weights_S is not None:
        narrow = out_weights_S.new_empty(num_slots + 1)
        narrow.index_copy_(0, _or_last(slots_RK, num_slots).flatten(), weights_RK.flatten().to(narrow.dtype))
        out_weights_S.copy_(narrow[:num_slots])


def _or_last(slots_RK: Tensor, last: int) -> Tensor:
    return torch.where(slots_RK < 0, last, slots_RK).long()


def gather_sum(
    rows_SD: Tensor,
    slots_RK: Tensor,
    out_RD: Tensor,
    values_S: Tensor | None = None,
    out_values_RK: Tensor | None = None,
) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    held_RK = slots_RK >= 0
    slot_RK = slots_RK.clamp_min(0).long()
    if rows_SD.shape[0] == 0:
        out_RD.zero_()
    elif slots_RK.numel() == rows_SD.shape[0]:
        ones = torch.ones(slots_RK.shape, dtype=rows_SD.dtype, device=rows_SD.device)  # without it the op takes K = 1
        out_RD.copy_(load_torch_npu().npu_moe_token_unpermute(rows_SD, slots_RK.flatten(), ones))
    else:
        total = torch.zeros(out_RD.shape, dtype=accumulation_dtype(rows_SD.dtype), device=rows_SD.device)
        for held_R, slot_R in zip(held_RK.unbind(1), slot_RK.unbind(1), strict=True):
            total += rows_SD.index_select(0, slot_R).masked_fill(~held_R.unsqueeze(1), 0)
        out_RD.copy_(total)
    if values_S is not None and out_values_RK is not None:
        if values_S.shape[0] == 0:
            out_values_RK.zero_()
        else:
            values = values_S.index_select(0, slot_RK.flatten()).view(slot_RK.shape)
            out_values_RK.copy_(values.masked_fill(~held_RK, 0))


def _counts(offsets_L: Tensor) -> Tensor:
    """Rows per group, int64: npu_grouped_matmul's group_list of type 1."""
    return torch.diff(offsets_L.long(), prepend=torch.zeros(1, dtype=torch.long, device=offsets_L.device))


def grouped_mm(left: Tensor, right: Tensor, offsets_L: Tensor) -> Tensor:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`.

    group_type 0 splits the rows of a product, 2 the dim that it sums over.
    """
    rows = left.shape[0] if right.ndim == 3 else left.shape[1]
    if rows == 0:
        shape = (0, right.shape[2]) if right.ndim == 3 else (offsets_L.numel(), left.shape[0], right.shape[1])
        return left.new_zeros(shape)
    split_item, group_type = (2, 0) if right.ndim == 3 else (3, 2)
    return load_torch_npu().npu_grouped_matmul(
        [left], [right], bias=None, group_list=_counts(offsets_L), split_item=split_item, group_type=group_type,
        group_list_type=1,
    )[0]  # fmt: skip


def supports(gate_up: Tensor, down: Tensor) -> bool:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`.

    float32, float16 or bfloat16, inner dims below 65536, at most 1024 groups.
    """
    fits = max(*gate_up.shape[1:], *down.shape[1:]) < 65536 and gate_up.shape[0] <= 1024
    return fits and gate_up.dtype == down.dtype and gate_up.dtype in (torch.float32, torch.float16, torch.bfloat16)


def swiglu(gate_up_SF: Tensor, weights_S: Tensor | None) -> Tensor:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    out = load_torch_npu().npu_swiglu(gate_up_SF, dim=-1)
    return out if weights_S is None else (out * weights_S.unsqueeze(-1)).to(out.dtype)


def alltoallv_grouped_mm(
    rows: Tensor, weights: Tensor, group: ProcessGroup, out_counts: list[int], in_counts: list[int], transposed: bool
) -> tuple[Tensor, Tensor]:
    """Send rows (sorted by expert) to their experts and multiply there: ``(product, the rows by local expert)``.

    Args:
        rows: ``[N, A]``. weights: ``[L, B, A]`` if ``transposed`` else ``[L, A, B]``.
        out_counts: rows to each expert of the group, E integers. in_counts: rows from each rank for each local expert,
            P * L integers, by rank.
    """
    product, _, received = load_torch_npu().npu_alltoallv_gmm(
        rows, weights, hccl_name(group), torch.distributed.get_world_size(group), out_counts, in_counts,
        trans_gmm_weight=transposed, permute_out_flag=True,
    )  # fmt: skip
    return product, received


def grouped_mm_alltoallv(
    rows: Tensor, weights: Tensor, group: ProcessGroup, out_counts: list[int], in_counts: list[int], transposed: bool
) -> Tensor:
    """Multiply rows (sorted by local expert) and send the products home: the way back of :func:`alltoallv_grouped_mm`.

    Counts are as there with the sides swapped: ``out_counts`` P * L by rank, ``in_counts`` E by expert.
    """
    product, _ = load_torch_npu().npu_gmm_alltoallv(
        rows, weights, hccl_name(group), torch.distributed.get_world_size(group), out_counts, in_counts,
        trans_gmm_weight=transposed,
    )  # fmt: skip
    return product
