"""The operators for CUDA: Triton kernels for index work, copies and SwiGLU, a library's grouped matmul for the rest.

The ``triton_*.py`` files and it alone import triton. No autotuning: block sizes follow from shapes, so the first step
compiles each kernel once. Runs under ``TRITON_INTERPRET=1`` with CPU tensors, which is how the unit tests check it.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_fsdpturbo.ops.quack import grouped_mm
from hf_fsdpturbo.ops.torch import supports
from hf_fsdpturbo.ops.triton_adamw import adamw_, square_sum
from hf_fsdpturbo.ops.triton_cross_entropy import add_product_, cross_entropy_
from hf_fsdpturbo.ops.triton_router_load import router_load, router_load_backward
from hf_fsdpturbo.ops.triton_rows import gather_sum, scatter_rows
from hf_fsdpturbo.ops.triton_sort import count_routing, own_slots, slot_pairs, write_pairs
from hf_fsdpturbo.ops.triton_swiglu import swiglu, swiglu_backward

__all__ = [
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


@triton.jit
def _scale_kernel(tensor_ptr, factor_ptr, count, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    value = tl.load(tensor_ptr + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(factor_ptr)
    tl.store(tensor_ptr + at, value.to(tensor_ptr.dtype.element_ty), mask=at < count)


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
