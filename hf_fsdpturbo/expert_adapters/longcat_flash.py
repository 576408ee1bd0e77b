"""LongCat-Flash: beside the routed experts there are some that return their input; those never leave their rank.

T tokens, K top-k, P (token, routed expert) pairs, E routed experts, Z experts that compute nothing, D hidden. The
model's ``gate_up_proj`` has E + Z rows, ``down_proj`` E: the last Z rows are stored and saved, and nothing reads them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_fsdpturbo.expert_adapters.convention import adapt_block, adapt_experts, grouped_swiglu

PATTERNS = ("model.layers.{*}.mlp.experts",)


def prepare(model: nn.Module) -> None:
    """Adapt every MoE block of a LongCat-Flash model."""
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts, LongcatFlashMoE

    for module in model.modules():
        if isinstance(module, LongcatFlashExperts):
            count = module.num_routed_experts
            adapt_experts(module, _rows, num_experts=count, has_unused_experts=True)
        elif isinstance(module, LongcatFlashMoE):
            adapt_block(module, _forward)


def _rows(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    gate_up = experts.gate_up_proj[: experts.num_experts]
    stacks = {"gate_up": gate_up, "down": experts.down_proj, "act_fn": experts.act_fn}
    return grouped_swiglu(hidden_states, top_k_index, top_k_weights, **stacks)


def _forward(block: Any, hidden_states: Tensor) -> Tensor:
    """``hidden_states [..., D]`` -> the same shape and dtype."""
    rows_TD = hidden_states.view(-1, hidden_states.shape[-1])
    _, weights_TK, index_TK = block.router(rows_TD)
    is_routed_TK = index_TK < block.config.n_routed_experts
    returned_TD = rows_TD * weights_TK.masked_fill(is_routed_TK, 0.0).sum(1, keepdim=True)
    pair_P = is_routed_TK.flatten().nonzero().squeeze(1)
    index_P1, weights_P1 = (pairs_TK.reshape(-1, 1)[pair_P] for pairs_TK in (index_TK, weights_TK))
    block.experts.token_of_row = pair_P // index_TK.shape[1]  # for those who count tokens and leave out padding
    routed_PD = block.experts(rows_TD[block.experts.token_of_row], index_P1, weights_P1).to(returned_TD.dtype)
    # Each pair has a place of its own, so that no sum depends on an order.
    pairs_ND = returned_TD.new_zeros(index_TK.numel(), rows_TD.shape[1]).index_copy(0, pair_P, routed_PD)
    output_TD = returned_TD + pairs_ND.view(*index_TK.shape, -1).sum(1)
    return output_TD.to(hidden_states.dtype).view(hidden_states.shape)
