"""Triton kernel of the LM head: logits become the gradient of their label's log-probability, in place.

One program a row, two passes over it: the first one folds the row into running maxima and sums, one set a lane (no
exchange between lanes inside the loop), the second one writes the gradient. The row is read twice and written once;
float32 inside. Runs under ``TRITON_INTERPRET=1`` with CPU tensors, as ``ops/triton.py``.

N tokens, V vocabulary.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_fsdpturbo import compat
from hf_fsdpturbo.ops.table import LogitTransform
from hf_fsdpturbo.ops.torch import add_product_ as in_one_dtype

_BLOCK, _WARPS = 8192, 16  # 16 logits a lane: two loads of 16 bytes in bf16; the fastest of six on an H200


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _logit(y, scale, softcap, inverse_temperature, SOFTCAP: tl.constexpr):
    """The logit as the model returns it, of one element or many."""
    z = y * scale
    if SOFTCAP:
        z = softcap * _tanh(z / softcap)
    return z * inverse_temperature


@triton.jit
def _cross_entropy_kernel(
    logit_ptr, stride, target_ptr, log_prob_ptr, entropy_ptr, top1_ptr, scale, softcap, inverse_temperature,
    V: tl.constexpr, B: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    scale, softcap = tl.cast(scale, tl.float32), tl.cast(softcap, tl.float32)
    inverse_temperature = tl.cast(inverse_temperature, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    base = logit_ptr + row * stride
    target = tl.load(target_ptr + row)
    lane = tl.arange(0, B)
    label = _logit(tl.load(base + target).to(tl.float32), scale, softcap, inverse_temperature, SOFTCAP)
    top, total = tl.full((B,), -1e30, tl.float32), tl.zeros((B,), tl.float32)
    moment, ahead = tl.zeros((B,), tl.float32), tl.zeros((B,), tl.int32)
    for start in range(0, V, B):
        at = start + lane
        inside = at < V
        y = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
        z = _logit(y, scale, softcap, inverse_temperature, SOFTCAP)
        z = tl.where(inside, z, -1e30)
        ahead |= ((z > label) | ((z == label) & (at < target))).to(tl.int32)
        grows = z > top
        less = tl.exp(-tl.abs(z - top))  # of the smaller one against the larger one: one exponential does for both
        fade, e = tl.where(grows, less, 1.0), tl.where(inside, tl.where(grows, 1.0, less), 0.0)
        total = total * fade + e
        moment = moment * fade + e * z
        top = tl.maximum(top, z)
    highest = tl.max(top, 0)
    fade = tl.exp(top - highest)
    whole = tl.sum(total * fade, 0)
    log_z = highest + tl.log(whole)
    tl.store(log_prob_ptr + row, label - log_z)
    tl.store(entropy_ptr + row, log_z - tl.sum(moment * fade, 0) / whole)
    tl.store(top1_ptr + row, (tl.max(ahead, 0) == 0).to(tl.int8))
    tl.debug_barrier()  # every thread has read the label's logit before one of them writes over it
    constant = scale * inverse_temperature
    for start in range(0, V, B):
        at = start + lane
        y = tl.load(base + at, mask=at < V, other=0.0).to(tl.float32)
        z = _logit(y, scale, softcap, inverse_temperature, SOFTCAP)
        gradient = (tl.where(at == target, 1.0, 0.0) - tl.exp(z - log_z)) * constant
        if SOFTCAP:
            tanh = _tanh(y * scale / softcap)
            gradient *= 1 - tanh * tanh
        tl.store(base + at, gradient.to(logit_ptr.dtype.element_ty), mask=at < V)


def cross_entropy_(
    logits_NV: Tensor, targets_N: Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`. One launch."""
    rows, vocabulary = logits_NV.shape
    log_probs, entropy = torch.empty((2, rows), dtype=torch.float32, device=logits_NV.device).unbind(0)
    is_top1 = torch.empty(rows, dtype=torch.int8, device=logits_NV.device)
    if rows:
        softcap = transform.softcap
        _cross_entropy_kernel[(rows,)](
            logits_NV, logits_NV.stride(0), targets_N.contiguous(), log_probs, entropy, is_top1,
            transform.scale, 1.0 if softcap is None else softcap, 1 / transform.temperature,
            V=vocabulary, B=min(_BLOCK, triton.next_power_of_2(vocabulary)), SOFTCAP=softcap is not None,
            num_warps=_WARPS,
        )  # fmt: skip
    return log_probs, entropy, is_top1.bool()


def add_product_(sum_AB: Tensor, left_AN: Tensor, right_NB: Tensor, *, fresh: bool = False) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`. cuBLAS adds to the float32 sum itself."""
    if sum_AB.is_cuda and left_AN.dtype in (torch.bfloat16, torch.float16) and compat.has_wide_addmm():
        beta = 0 if fresh else 1
        torch.addmm(sum_AB, left_AN, right_NB, out_dtype=torch.float32, beta=beta, out=sum_AB)
    else:
        in_one_dtype(sum_AB, left_AN, right_NB, fresh=fresh)
