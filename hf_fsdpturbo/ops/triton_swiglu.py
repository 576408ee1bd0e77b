"""SwiGLU of stacked experts in Triton: forward, and a backward that also gives the forward's output again.

Runs under ``TRITON_INTERPRET=1`` with CPU tensors, as ``ops/triton.py``. Letters as in ``ops/table.py``.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_fsdpturbo.ops.triton_rows import acc_dtype

# Shape of a program; benchmarks/kernel_sweep.py tries others.
_SWIGLU_ROWS, _SWIGLU_COLUMNS, _SWIGLU_WARPS = 4, 256, 4  # 256 columns are a warp's 16-byte loads


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
            WEIGHTS=weights_S is not None, ACC=acc_dtype(out.dtype), **constants,
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
            WEIGHTS=weights_S is not None, ACC=acc_dtype(out.dtype), **constants,
        )  # fmt: skip
    return gate_up_gradient, weights_gradient, out
