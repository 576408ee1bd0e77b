"""Local experts with LoRA on their stacked weights, as dispatchers see them.

L local experts, r rank, I in, O out features of one expert's matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_fsdpturbo.sharding.expert_lora import FACTORS, base_module, wrapper_chain
from hf_fsdpturbo.sharding.expert_parallel import ModuleExperts
from hf_fsdpturbo.shards import local_tensor


class AdaptedExperts(ModuleExperts):
    """Local experts whose weights are ``W + s B A``: PEFT's own arithmetic, without its parametrisations.

    Args:
        module: the outermost wrapper.
        forward: the forward of the experts module inside.
        num_local_experts: experts of this rank.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], num_local_experts: int) -> None:
        super().__init__(base_module(module), forward, num_local_experts)
        self.wrappers = wrapper_chain(module)

    def local_parameters(self) -> dict[str, Tensor]:
        """As the base class, with the active adapters added. Also a rank without tokens so reaches the factors."""
        local = super().local_parameters()
        for wrapper in self.wrappers:
            if wrapper.disable_adapters or wrapper.merged:
                continue
            for adapter in wrapper.active_adapters:
                if adapter in wrapper.lora_A:
                    local[wrapper.parameter_name] = self._add(local[wrapper.parameter_name], wrapper, adapter)
        return local

    def _add(self, weight: Tensor, wrapper: Any, adapter: str) -> Tensor:
        """``weight [L, O, I]`` (``[L, I, O]`` in transposed layouts) plus one adapter, in the dtype of the weight."""
        a_LrI, b_LOr = (local_tensor(getattr(wrapper, factor)[adapter].weight).to(weight.dtype) for factor in FACTORS)
        if getattr(self.module, "is_transposed", False):
            left, right = a_LrI.transpose(1, 2), b_LOr.transpose(1, 2)
        else:
            left, right = b_LOr, a_LrI
        return torch.baddbmm(weight, left, right, alpha=wrapper.scaling[adapter])
