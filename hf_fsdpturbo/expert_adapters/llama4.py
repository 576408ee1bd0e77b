"""Llama 4 scales an expert's input, not its output, and runs every expert on every token: here only on its own.

T tokens, K top-k, E experts, D hidden. The others' inputs are scaled by zero, and an expert gives zero for zero, with
zero gradients: leaving them out changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_fsdpturbo.expert_adapters.convention import adapt_block, adapt_experts, grouped_swiglu

PATTERNS = (
    "model.layers.{*}.feed_forward.experts",  # the text model alone
    "language_model.model.layers.{*}.feed_forward.experts",  # inside the one with images
)


def prepare(model: nn.Module) -> None:
    """Adapt every MoE block of a Llama 4 model."""
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

    for module in model.modules():
        if isinstance(module, Llama4TextExperts):
            count = module.gate_up_proj.shape[0]
            adapt_experts(module, _rows, num_experts=count, is_transposed=True)
        elif isinstance(module, Llama4TextMoe):
            adapt_block(module, _forward)


def _rows(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    stacks = {"gate_up": experts.gate_up_proj, "down": experts.down_proj, "act_fn": experts.act_fn}
    return grouped_swiglu(hidden_states, top_k_index, top_k_weights, **stacks, is_transposed=True)


def _forward(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """``hidden_states [..., D]`` -> ``([T, D], router logits [T, E])``, as the block's own forward.

    The experts' rows are tokens already scaled, one for each choice, and each has weight one.
    """
    rows_TD = hidden_states.reshape(-1, block.hidden_dim)
    scores_TE, logits_TE = block.router(rows_TD)
    # Scores that were not chosen are exactly zero. Sorted: by size, near ties may change places in recompute.
    index_TK = scores_TE.detach().topk(block.top_k, dim=1).indices.sort(dim=1).values
    scaled_TKD = rows_TD.unsqueeze(1) * scores_TE.gather(1, index_TK).unsqueeze(-1)
    scaled_ND, index_N1 = scaled_TKD.flatten(0, 1), index_TK.reshape(-1, 1)
    tokens_T = torch.arange(len(rows_TD), device=rows_TD.device)
    block.experts.token_of_row = tokens_T.repeat_interleave(block.top_k)  # for those who count tokens, not padding
    routed_ND = block.experts(scaled_ND, index_N1, torch.ones_like(index_N1, dtype=scaled_ND.dtype))
    routed_TD = routed_ND.view(scaled_TKD.shape).sum(1)
    return block.shared_expert(rows_TD) + routed_TD, logits_TE
