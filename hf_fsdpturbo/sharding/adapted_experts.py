"""Local experts with LoRA on their stacked weights, as dispatchers see them.

L local experts, r rank, I in, O out features of one expert's matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_fsdpturbo.sharding.expert_lora import FACTORS, base_module, to_expert_first, wrapper_chain
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
        return {name: self.adapted(name, weight) for name, weight in super().local_parameters().items()}

    def adapted(self, name: str, weight: Tensor) -> Tensor:
        """``weight [L, O, I]`` (``[L, I, O]`` in transposed layouts) plus its adapters, in the dtype of the weight."""
        for wrapper, adapter in self.active(name):
            left, right = self.factors(wrapper, adapter, weight.dtype)
            weight = torch.baddbmm(weight, left, right, alpha=wrapper.scaling[adapter])
        return weight

    def active(self, name: str) -> Iterator[tuple[Any, str]]:
        """The wrappers of one stack, with the adapters that count now."""
        for wrapper in self.wrappers:
            if wrapper.parameter_name == name and not wrapper.disable_adapters and not wrapper.merged:
                yield from ((wrapper, adapter) for adapter in wrapper.active_adapters if adapter in wrapper.lora_A)

    def factors(self, wrapper: Any, adapter: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``(left, right)`` of one adapter in ``dtype``, whose product has the layout of the weight."""
        weights = (local_tensor(getattr(wrapper, factor)[adapter].weight).to(dtype) for factor in FACTORS)
        a_LrI, b_LOr = (
            weight if weight.ndim == 3 else to_expert_first(factor, weight, self.num_local_experts)
            for factor, weight in zip(FACTORS, weights, strict=True)
        )
        if getattr(self.module, "is_transposed", False):
            return a_LrI.transpose(1, 2), b_LOr.transpose(1, 2)
        return b_LOr, a_LrI
