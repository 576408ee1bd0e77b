"""Ulysses attention: all heads of this rank's slice become its heads of the whole sequence, and back.

B batch, S whole sequence, s this rank's slice, H / G query / key heads, h = H / cp, X head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_fsdpturbo.context_parallel.collectives import heads_to_sequence, sequence_to_heads
from hf_fsdpturbo.context_parallel.local_attention import KERNELS, Call, Kernel
from hf_fsdpturbo.packing.sequence_plan import KEYWORD, SequencePlan

# Keywords of Transformers' attention calls that describe the slice, where the kernels get the whole sequence.
_NOT_PASSED_ON = (
    "position_ids", "position_embeddings", "cache", "cache_position", "use_cache", "documents", "output_attentions",
    "output_router_logits", "output_hidden_states", "is_causal", "num_items_in_batch", "cu_seq_lens_q",
    "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
)  # fmt: skip


def head_copies(heads: int, size: int) -> int:
    """How often each of ``heads`` key heads is repeated so that ``size`` ranks divide them evenly; 1 if they do.

    Where ``size`` divides the query heads, the result divides the query heads per key head, so that every rank's
    key heads are those of its query heads.
    """
    return size // math.gcd(heads, size)


def spread_heads(query: Tensor, key: Tensor, value: Tensor, plan: SequencePlan) -> list[Tensor]:
    """``query [B, s, H, X], key, value [B, s, G, X]`` -> this rank's heads of the whole sequence.

    Autograd sums the gradients of repeated key heads, on the rank of their slice. What autocast is about to round to
    half precision is rounded before it travels.
    """
    if torch.is_autocast_enabled(query.device.type):
        half = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(half), key.to(half), value.to(half)
    copies = head_copies(key.shape[2], plan.size)
    if copies > 1:
        key, value = key.repeat_interleave(copies, 2), value.repeat_interleave(copies, 2)
    return sequence_to_heads([query, key, value], plan.cp_group)


def _check_call(module: nn.Module, name: str, kernel: Kernel, mask: Any, sinks: Any, keywords: dict[str, Any]) -> None:
    layer = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if KEYWORD not in keywords:
        raise ValueError(
            f"{layer} ran context-parallel attention outside the model's forward, or its layer does not pass "
            "keywords on to its attention. Call the model itself; a model that drops keywords needs cp_size=1."
        )
    if mask is not None:
        raise ValueError(
            f"{layer} builds an attention mask of its own, which context parallelism cannot cut. Use cp_size=1."
        )
    if not keywords.get("is_causal", getattr(module, "is_causal", True)):
        raise ValueError(f"{layer} is not causal, which context parallelism does not support. Use cp_size=1.")
    if keywords.get("position_bias") is not None:
        raise ValueError(f"{layer} has a position bias, which context parallelism does not support. Use cp_size=1.")
    for what, given, able in (("sinks", sinks, kernel.sinks), ("softcap", keywords.get("softcap"), kernel.softcap)):
        if given is not None and not able:
            able_ones = [n for n, k in KERNELS.items() if (k.sinks if what == "sinks" else k.softcap)]
            raise ValueError(
                f"{layer} has attention {what}, which attn_implementation={name!r} cannot compute. "
                f"Choose one of {able_ones}."
            )


def ulysses_attention(name: str) -> Callable[..., tuple[Tensor, None]]:
    """Attention function for Transformers' registry that runs kernel ``name`` after the exchange."""
    kernel = KERNELS[name]

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """``query [B, H, s, X], key, value [B, G, s, X]`` -> ``([B, s, H, X], None)``, as Transformers calls it."""
        _check_call(module, name, kernel, attention_mask, s_aux, keywords)
        plan: SequencePlan = keywords.pop(KEYWORD)
        q, k, v = spread_heads(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), plan)
        sinks = None if s_aux is None else s_aux.view(plan.size, -1)[plan.rank]
        softcap = keywords.pop("softcap", None)
        extra = {n: x for n, x in keywords.items() if n not in _NOT_PASSED_ON}
        call = Call(module, scaling, sliding_window, sinks, softcap, extra)
        out = kernel.run(*(x.transpose(1, 2) for x in (q, k, v)), plan, call)
        return heads_to_sequence(out, plan.cp_group), None

    return attention


def register_attention() -> None:
    """Put every kernel's exchange into Transformers' registry; again is harmless.

    No mask function goes with them: Transformers then builds no mask of the slice and looks for no packed documents
    in it.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, kernel in KERNELS.items():
        ALL_ATTENTION_FUNCTIONS.register(kernel.key, ulysses_attention(name))
