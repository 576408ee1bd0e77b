"""The gated delta rule over a cut sequence: its convolution gets the columns before the slice, its rule whole heads.

B batch, S whole sequence, s this rank's slice, C conv channels, W conv width, Hk / Hv key / value heads.

Only the two functions that a layer calls are replaced (module globals of its modeling file); projections, norms and
gates work position by position and need nothing. So every parameter's gradient is a plain partial sum over this rank's
positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fsdpturbo.context_parallel.collectives import columns_before, heads_to_sequence, sequence_to_heads
from hf_fsdpturbo.context_parallel.ulysses import head_copies
from hf_fsdpturbo.kernels.rebinding import current_conv, current_rule, linear_attention_layers, rebind
from hf_fsdpturbo.packing.documents import Documents, documents_from_ids
from hf_fsdpturbo.packing.sequence_plan import KEYWORD, SequencePlan

# What the boundary has taken into the plan, and the None that stands in for it.
_IN_THE_PLAN = ("documents", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def _halo_documents(plan: SequencePlan, width: int) -> Documents | None:
    """Documents of this rank's positions and ``width`` before them; the zeros before rank 0's are one of their own."""
    if plan.documents is None:
        return None
    ids = F.pad(plan.documents.ids, (width, 0), value=-1)
    return documents_from_ids(ids[:, plan.local.start : plan.local.stop + width])


def with_halo(conv: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``causal_conv1d_fn`` of a slice ``[B, C, s]``: runs ``conv`` on the slice with the W - 1 columns before it."""

    def conv_with_halo(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **keywords: Any,
    ) -> Tensor:
        plan: SequencePlan | None = keywords.pop(KEYWORD, None)
        if plan is None:  # a model of the same file without context parallelism
            return conv(hidden_states, weight, bias, activation=activation, **keywords)
        keywords = {n: x for n, x in keywords.items() if n not in _IN_THE_PLAN}
        width = weight.shape[-1] - 1
        before = columns_before(hidden_states, width, plan.cp_group)
        documents = plan.once(("halo", width), lambda: _halo_documents(plan, width))
        if documents is not None:
            keywords["documents"] = documents
        wide = torch.cat((before, hidden_states), dim=-1)
        return conv(wide, weight, bias, activation=activation, **keywords)[..., width:]

    return conv_with_halo


def with_whole_heads(rule: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """``torch_chunk_gated_delta_rule`` of a slice: runs ``rule`` on this rank's heads of the whole sequence."""

    def rule_on_whole_heads(
        query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **keywords: Any
    ) -> tuple[Tensor, Any]:
        """``query, key [B, s, Hk, X], value [B, s, Hv, Y], g, beta [B, s, Hv]`` -> ``[B, s, Hv, Y]`` and no state."""
        plan: SequencePlan | None = keywords.pop(KEYWORD, None)
        if plan is None:
            return rule(query, key, value, g=g, beta=beta, **keywords)
        keywords = {n: x for n, x in keywords.items() if n not in _IN_THE_PLAN}
        copies = head_copies(key.shape[2], plan.size)
        if copies > 1:
            query, key = query.repeat_interleave(copies, 2), key.repeat_interleave(copies, 2)
        parts = _exchange([query, key, value, g.unsqueeze(-1), beta.unsqueeze(-1)], plan)
        if plan.documents is not None:
            keywords["documents"] = plan.documents
        out, state = rule(*parts[:3], g=parts[3].squeeze(-1), beta=parts[4].squeeze(-1), **keywords)
        return heads_to_sequence(out, plan.cp_group), state

    return rule_on_whole_heads


def _exchange(tensors: list[Tensor], plan: SequencePlan) -> list[Tensor]:
    """One collective per dtype: the decay ``g`` stays float32 beside bf16 heads."""
    out: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        places = [i for i, x in enumerate(tensors) if x.dtype == dtype]
        moved = sequence_to_heads([tensors[i] for i in places], plan.cp_group)
        out.update(zip(places, moved, strict=True))
    return [out[i] for i in range(len(tensors))]


def conv_reach(model: nn.Module) -> int:
    """The most columns a convolution of the model reaches back: W - 1; 0 without linear attention."""
    widths = [
        module.weight.shape[-1] - 1
        for _, layer in linear_attention_layers(model)
        for module in layer.modules()
        if isinstance(module, nn.Conv1d)
    ]
    return max(widths, default=0)


def install_linear_attention(model: nn.Module, size: int) -> None:
    """Wrap the rule and convolution in use (those of ``kernels`` are bound before), as long as ``model`` lives."""
    rule, conv = current_rule(model), current_conv(model)
    rebind(model, rule=with_whole_heads(rule), conv=with_halo(conv), layer="context_parallel", key=("cp", size))
