"""Where the routers of a model are, and their correction biases: by names, as Transformers' families have them.

Note [Correction biases in Transformers 5.24]. All are added to the scores that choose experts, never to the weights of
those chosen: a larger one gives its expert more tokens. By name, kind, place and dtype as built:

    e_score_correction_bias  buffer [E] float32 of the router: deepseek_v3, glm4_moe and what descends from them
    e_score_correction_bias  buffer [E] float32 of the block: hy_v3; in the model's dtype: minimax_m2
    e_score_correction_bias  buffer [E] of the router, in the model's dtype: minimax_m3_vl, step3p7, longcat_flash
                             (there with entries for its zero experts, which receive no row)
    e_score_correction_bias  frozen parameter: ernie4_5_moe, ernie4_5_vl_moe [1, E] float32 (gate.moe_statics);
                             laguna [E] in the model's dtype
    expert_bias              buffer [E] float32 of the block: lfm2_moe; frozen parameter [E] float32: afmoe

deepseek_v4 has none in its first layers, whose tokens are hashed to experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from hf_fsdpturbo.model_spec import find_experts

ROUTERS = ("gate", "router")
"""Names of the router beside an experts module."""
BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of a correction bias in the block round an experts module."""


def find_routers(model: Any) -> dict[str, nn.Module]:
    """Routers by name, in model order; none for a dense model, or a family without a spec."""
    found = {}
    for name in find_experts(model, ep_size=1):
        block = _block(name)
        for child, module in model.get_submodule(block).named_children():
            if child in ROUTERS:
                found[f"{block}.{child}"] = module
    return found


def find_biases(model: nn.Module, experts: Iterable[str]) -> dict[str, Tensor]:
    """The correction bias of each experts module that has one, by the module's name.

    Args:
        model: whole or sharded.
        experts: names of experts modules.
    """
    found = {}
    for name in experts:
        block = model.get_submodule(_block(name))
        inside = f"{name.rpartition('.')[2]}."
        tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        mine = [t for n, t in tensors.items() if n.rpartition(".")[2] in BIASES and not n.startswith(inside)]
        if mine:
            found[name] = mine[0]
    return found


def _block(experts: str) -> str:
    return experts.rpartition(".")[0]
