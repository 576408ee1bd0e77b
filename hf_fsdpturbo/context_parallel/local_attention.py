"""Attention of this rank's heads over the whole sequence: the kernel the user asked for, with masks from the plan.

B batch, S whole sequence, h / g this rank's query / key heads, X head size.

Each kernel takes ``query [B, h, S, X], key, value [B, g, S, X]`` and returns ``[B, S, h, X]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fsdpturbo.code_facts import forward_of
from hf_fsdpturbo.packing.sequence_plan import SequencePlan, block_mask

EAGER = "eager_attention_forward"  # what every modeling file calls its own eager attention

# Up to this length packed rows run under one S x S mask; beyond, document by document: the mask grows with the square
# of the length (16 GB at 128k), the loop only with the number of documents.
LONGEST_MASKED = 8192


@dataclass(frozen=True)
class Call:
    """What a layer asked of its attention.

    Attributes:
        module: the attention module.
        scaling: factor of the scores; None for 1 / sqrt(X).
        window: keys a query may reach back, itself included; None for all.
        sinks: ``[h]`` this rank's attention sinks, or None.
        softcap: tanh cap of the scores, or None.
        extra: further keywords of the layer.
    """

    module: nn.Module
    scaling: float | None
    window: int | None
    sinks: Tensor | None
    softcap: float | None
    extra: dict[str, Any]


def sdpa(query: Tensor, key: Tensor, value: Tensor, plan: SequencePlan, call: Call) -> Tensor:
    """``scaled_dot_product_attention``; causal without a mask where that is enough."""
    if plan.documents is not None and plan.valid is None and call.window is None and plan.length > LONGEST_MASKED:
        return _document_by_document(query, key, value, plan, call)
    mask = plan.mask(call.window)
    return _sdpa(query, key, value, mask, call.scaling).transpose(1, 2)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    if grouped and (mask is not None or key.shape[-1] != value.shape[-1]):  # grouped kernels take no mask
        groups = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _document_by_document(query: Tensor, key: Tensor, value: Tensor, plan: SequencePlan, call: Call) -> Tensor:
    assert plan.documents is not None
    bounds = plan.once("bounds", plan.documents.cu_seqlens_cpu.tolist)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [B * S, heads, X]
    outs = []
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        q, k, v = (x[start:stop].transpose(0, 1).unsqueeze(0) for x in rows)
        outs.append(_sdpa(q, k, v, None, call.scaling).squeeze(0).transpose(0, 1))
    return torch.cat(outs).unflatten(0, (plan.batch, plan.length))


class _LocalModule:
    """An attention module as its own eager function shall see it here: fewer heads, the right groups."""

    def __init__(self, module: nn.Module, groups: int, sinks: Tensor | None) -> None:
        self._module = module
        self.num_key_value_groups = groups
        if sinks is not None:
            self.sinks = sinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def eager(query: Tensor, key: Tensor, value: Tensor, plan: SequencePlan, call: Call) -> Tensor:
    """The modeling file's own eager attention (which knows its sinks and caps), on this rank's heads."""
    own = forward_of(call.module, "its file").__globals__[EAGER]
    module = _LocalModule(call.module, query.shape[1] // key.shape[1], call.sinks)
    keywords = dict(call.extra)
    for name, given in (("softcap", call.softcap), ("s_aux", call.sinks), ("sliding_window", call.window)):
        if given is not None:
            keywords[name] = given
    mask = plan.additive_mask(call.window, query.dtype)
    return own(module, query, key, value, mask, scaling=call.scaling, dropout=0.0, **keywords)[0]


def flash(name: str) -> Callable[..., Tensor]:
    """Transformers' flash attention of that name; packed rows as one run of documents, lengths known once a step."""

    def run(query: Tensor, key: Tensor, value: Tensor, plan: SequencePlan, call: Call) -> Tensor:
        from transformers.integrations.flash_attention import get_target_dtype
        from transformers.modeling_flash_attention_utils import (
            _flash_attention_forward,
            flash_attn_supports_top_left_mask,
        )

        lengths: dict[str, Any] = {}
        if plan.documents is not None:
            bounds = plan.documents.cu_seqlens
            counts = plan.documents.cu_seqlens_cpu.diff()
            longest = plan.once("longest", lambda: int(counts.max()))
            lengths = {f"cu_seq_lens_{x}": bounds for x in "qk"} | {f"max_length_{x}": longest for x in "qk"}
        if lengths and plan.valid is not None:
            raise ValueError(
                f"attn_implementation={name!r} with cp_size={plan.size}: packed documents and padding before or "
                "inside a row cannot be honoured together. Pad on the right, or leave attention_mask out of packed "
                "batches."
            )
        width = value.shape[-1]  # the kernels want one head size for all three (MLA has two)
        value = F.pad(value, (0, query.shape[-1] - width))
        out = _flash_attention_forward(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            plan.valid,
            query_length=plan.length,
            is_causal=True,
            dropout=0.0,
            softmax_scale=call.scaling,
            sliding_window=call.window,
            softcap=call.softcap,
            use_top_left_mask=flash_attn_supports_top_left_mask(),
            target_dtype=get_target_dtype(query, call.module),
            attn_implementation=name,
            s_aux=None if call.sinks is None else call.sinks.to(query.dtype),
            **lengths,
        )
        return out[..., :width]

    return run


def flex(query: Tensor, key: Tensor, value: Tensor, plan: SequencePlan, call: Call) -> Tensor:
    """Flex attention with one block mask a step and window."""
    from transformers.integrations.flex_attention import flex_attention_forward

    blocks = plan.once(("blocks", call.window), lambda: block_mask(plan, call.window))
    out, _ = flex_attention_forward(
        call.module, query, key, value, blocks, scaling=call.scaling, softcap=call.softcap, s_aux=call.sinks
    )
    return out


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention, and what it can do."""

    key: str  # under which the exchange is registered; Transformers looks for hub kernels in names with "flash"
    run: Callable[..., Tensor]
    sinks: bool
    softcap: bool


# attn_implementation -> kernel
KERNELS: dict[str, Kernel] = {
    "sdpa": Kernel("turbo_ulysses_sdpa", sdpa, sinks=False, softcap=False),
    "eager": Kernel("turbo_ulysses_eager", eager, sinks=True, softcap=True),
    "flash_attention_2": Kernel("turbo_ulysses_fa2", flash("flash_attention_2"), sinks=False, softcap=True),
    "flash_attention_3": Kernel("turbo_ulysses_fa3", flash("flash_attention_3"), sinks=True, softcap=True),
    "flash_attention_4": Kernel("turbo_ulysses_fa4", flash("flash_attention_4"), sinks=True, softcap=True),
    "flex_attention": Kernel("turbo_ulysses_flex", flex, sinks=True, softcap=True),
}
