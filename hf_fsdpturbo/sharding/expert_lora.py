"""LoRA on stacked experts: storage with the expert first, which shards like the base weights, and PEFT's layout.

E all experts, r rank, I in, O out features of one expert's matrix. PEFT wraps a module once for each target parameter
(``ParamWrapper``, nested) and keeps both factors as matrices:

               PEFT                                    here
    lora_A     [E*r, I]  expert slowest                [E, r, I]
    lora_B     [O, r*E]  expert FASTEST                [E, O, r]

Cut along dim 0 over ep, an expert's factors lie where its base weights are; PEFT's ``lora_B`` cut along either dim
would train other experts' columns without an error. Adapter files keep PEFT's layout.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

FACTORS = ("lora_A", "lora_B")
WRAPPED = ("base_layer", "original_module")
"""Children in which PEFT's wrappers keep the module that they stand for."""


def name_without_wrappers(name: str) -> str:
    """A parameter's name as it was before PEFT wrapped modules: Transformers' ties, and checkpoints, know no other."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def is_param_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper of one parameter (told by class name, also after FSDP has subclassed it)."""
    return any(cls.__name__ == "ParamWrapper" for cls in type(module).__mro__)


def wrapper_chain(module: nn.Module) -> list[Any]:
    """The nested wrappers of a module, outermost first; empty for a module without adapters."""
    chain: list[Any] = []
    while is_param_wrapper(module):
        chain.append(module)
        module = cast(nn.Module, module.base_layer)
    return chain


def base_module(module: nn.Module) -> nn.Module:
    """The experts module inside its wrappers."""
    while is_param_wrapper(module):
        module = cast(nn.Module, module.base_layer)
    return module


def to_expert_first(factor: str, weight: Tensor, num_experts: int) -> Tensor:
    """PEFT's matrix as ``[E, r, I]`` (``factor`` "lora_A") or ``[E, O, r]`` ("lora_B"); a view where possible."""
    if factor == "lora_A":
        return weight.reshape(num_experts, -1, weight.shape[-1])
    return weight.reshape(weight.shape[0], -1, num_experts).permute(2, 0, 1)


def to_peft(factor: str, weight: Tensor) -> Tensor:
    """Inverse of :func:`to_expert_first`: ``[E*r, I]`` or ``[O, r*E]``."""
    if factor == "lora_A":
        return weight.reshape(-1, weight.shape[-1])
    return weight.permute(1, 2, 0).reshape(weight.shape[1], -1)


def store_expert_first(module: nn.Module, name: str) -> None:
    """Turn the factors of all adapters on an experts module into three-dimensional parameters, in place.

    Raises:
        ValueError: an adapter on a parameter that is not stacked over experts; names layer and parameter.
    """
    for wrapper in wrapper_chain(module):
        base = base_module(wrapper).get_parameter(wrapper.parameter_name)
        if base.ndim != 3:
            raise ValueError(
                f"target_parameters: {name}.{wrapper.parameter_name} has shape {tuple(base.shape)}; LoRA under expert "
                "parallelism needs [experts, rows, columns]. Remove it from target_parameters."
            )
        for factor in FACTORS:
            for linear in getattr(wrapper, factor).values():
                if linear.weight.ndim == 3:
                    continue
                stacked = to_expert_first(factor, linear.weight.detach(), base.shape[0]).contiguous()
                linear.weight = nn.Parameter(stacked, requires_grad=linear.weight.requires_grad)


def expert_factors(model: nn.Module) -> dict[str, str]:
    """Names of parameters stored expert first -> "lora_A" or "lora_B"."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if is_param_wrapper(module):
            for factor in FACTORS:
                for adapter, linear in getattr(module, factor).items():
                    if linear.weight.ndim == 3:
                        found[".".join(filter(None, (name, factor, adapter, "weight")))] = factor
    return found


def merged_weight(weight: Tensor, wrapper: Any, adapter: str, a: Tensor, b: Tensor, box: tuple[slice, ...]) -> Tensor:
    """A local part of a stacked weight plus the same part of ``s B A``, computed in float32.

    Args:
        weight: local part, ``[l, o, i]`` (``[l, i, o]`` transposed).
        a, b: whole factors, ``[E, r, I]`` and ``[E, O, r]``.
        box: where the part lies in the whole weight.
    """
    experts, rows, columns = box
    if getattr(base_module(wrapper), "is_transposed", False):
        left, right = a[experts, :, rows].transpose(1, 2), b[experts, columns].transpose(1, 2)
    else:
        left, right = b[experts, rows], a[experts, :, columns]
    delta = torch.bmm(left.float(), right.float()) * wrapper.scaling[adapter]
    return (weight.float() + delta.to(weight.device)).to(weight.dtype)
