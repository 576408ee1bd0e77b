"""Triton kernels of the aux loss: softmax, top-k and both sums over tokens in one pass over a layer's router logits.

A program takes some tokens with all their experts, chooses K times the largest probability that is left (of equals
that with the smallest number, as torch's top-k on CUDA), and writes what its tokens add to the sums; no atomics, so
the same in every run. Runs under ``TRITON_INTERPRET=1`` with CPU tensors, as ``ops/triton.py``.

Letters as in ``ops/table.py``.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096  # tokens times experts of a program: 32 registers a thread


@triton.jit(do_not_specialize=["num_tokens"])
def _router_load_kernel(
    logit_ptr, stride, mask_ptr, prob_ptr, part_ptr, num_tokens, E: tl.constexpr, K: tl.constexpr, MASK: tl.constexpr,
    TB: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TB + tl.arange(0, TB)
    expert = tl.arange(0, EB)
    inside = (token < num_tokens)[:, None] & (expert < E)[None, :]
    logit = tl.load(logit_ptr + token[:, None] * stride + expert[None, :], mask=inside, other=float("-inf"))
    logit = logit.to(tl.float32)
    raised = tl.exp(logit - tl.where(token < num_tokens, tl.max(logit, 1), 0.0)[:, None])
    total = tl.where(token < num_tokens, tl.sum(raised, 1), 1.0)
    prob = (raised / total[:, None]).to(prob_ptr.dtype.element_ty)
    tl.store(prob_ptr + token[:, None] * E + expert[None, :], prob, mask=inside)
    prob = tl.where(inside, prob.to(tl.float32), -1.0)
    left = prob
    chosen = tl.zeros((TB, EB), tl.float32)
    for _ in tl.static_range(K):
        largest = tl.max(left, 1)
        at = tl.min(tl.where(left == largest[:, None], expert[None, :], EB), 1)
        hit = expert[None, :] == at[:, None]
        chosen += hit.to(tl.float32)
        left = tl.where(hit, -1.0, left)
    weight = (token < num_tokens).to(tl.float32)
    if MASK:
        weight = tl.load(mask_ptr + token, mask=token < num_tokens, other=0.0)
    weight = weight[:, None]
    out = part_ptr + tl.program_id(0) * 2 * E + expert
    tl.store(out, tl.sum(tl.where(inside, chosen * weight, 0.0), 0), mask=expert < E)
    tl.store(out + E, tl.sum(tl.where(inside, prob * weight, 0.0), 0), mask=expert < E)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _router_load_backward_kernel(
    prob_ptr, slope_ptr, mask_ptr, out_ptr, num_rows, num_tokens, E: tl.constexpr, MASK: tl.constexpr,
    NB: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * NB + tl.arange(0, NB)
    expert = tl.arange(0, EB)
    inside = (row < num_rows)[:, None] & (expert < E)[None, :]
    prob = tl.load(prob_ptr + row[:, None] * E + expert[None, :], mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(slope_ptr + expert, mask=expert < E, other=0.0)[None, :]
    if MASK:
        gradient = gradient * tl.load(mask_ptr + row % num_tokens, mask=row < num_rows, other=0.0)[:, None]
    out = prob * (gradient - tl.sum(gradient * prob, 1)[:, None])
    tl.store(out_ptr + row[:, None] * E + expert[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


def _shape(experts: int) -> tuple[int, int]:
    """``(rows, experts)`` of a program, powers of two."""
    width = triton.next_power_of_2(experts)
    return max(1, _ELEMENTS // width), width


def router_load(logits_TE: Tensor, top_k: int, mask_T: Tensor | None, probs_TE: Tensor) -> Tensor:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    tokens, experts = logits_TE.shape
    rows, width = _shape(experts)
    programs = triton.cdiv(tokens, rows)
    parts = torch.empty(programs, 2, experts, dtype=torch.float32, device=logits_TE.device)
    _router_load_kernel[(programs,)](
        logits_TE, logits_TE.stride(0), parts if mask_T is None else mask_T, probs_TE, parts, tokens,
        E=experts, K=top_k, MASK=mask_T is not None, TB=rows, EB=width,
    )  # fmt: skip
    return parts.sum(0)


def router_load_backward(probs_NE: Tensor, slope_E: Tensor, mask_T: Tensor | None, out_NE: Tensor) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    total, experts = probs_NE.shape
    rows, width = _shape(experts)
    _router_load_backward_kernel[(triton.cdiv(total, rows),)](
        probs_NE, slope_E, slope_E if mask_T is None else mask_T, out_NE, total, 1 if mask_T is None else len(mask_T),
        E=experts, MASK=mask_T is not None, NB=rows, EB=width,
    )  # fmt: skip
