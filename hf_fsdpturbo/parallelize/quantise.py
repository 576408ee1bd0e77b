"""Where quantised weights meet a model's experts, routers and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_fsdpturbo.dispatch.dispatcher import get_dispatcher
from hf_fsdpturbo.dispatch.recompute import find_routers
from hf_fsdpturbo.expert_stacks import called_by, stack_names
from hf_fsdpturbo.lora.adapter import trained_copies
from hf_fsdpturbo.model_spec import find_experts
from hf_fsdpturbo.parallelize.routed_experts import RoutedForward
from hf_fsdpturbo.quantised.asked import FourBit
from hf_fsdpturbo.quantised.filling import Filling
from hf_fsdpturbo.quantised.kept_release import Kept
from hf_fsdpturbo.quantised.methods import PackedAs, dequantised_by
from hf_fsdpturbo.sharding.expert_lora import base_module
from hf_fsdpturbo.sharding.packed_experts import PackedExperts, has_packed_experts

if TYPE_CHECKING:
    from hf_fsdpturbo.arguments import FSDPTurboArguments


def filling_of(asked: FourBit | None, config: FSDPTurboArguments) -> Filling | None:
    """The quantised weights that a load will have.

    Raises:
        ValueError: settings that whole or float weights come by.
    """
    if asked is None:
        return None
    for field, value, fix in _against(config):
        raise ValueError(
            f"{field} is {value!r}, which does not take weights in 4 bits (load_in_4bit). Set it to {fix!r}."
        )
    return Filling(asked, config.device)


def kept_of(release: PackedAs | None, setting: Any, config: FSDPTurboArguments) -> tuple[Kept | None, list[str]]:
    """The stacks of an MXFP4 release that stay packed beside an adapter, unless they are asked for in full.

    Args:
        release: how it says that it is packed.
        setting: ``quantization_config`` of ``model_init_kwargs``.
        config: the run's.

    Returns:
        them, or None; what the summary says where settings keep them from it.
    """
    if release is None or release.method != "mxfp4" or dequantised_by(setting) is not None:
        return None, []
    notes = [
        f"experts in MXFP4 are dequantised: {field}={value!r} does not take packed weights"
        for field, value, _ in _against(config)
    ]
    return (None if notes else Kept(config.device)), notes


def _against(config: FSDPTurboArguments) -> Iterator[tuple[str, Any, Any]]:
    """Settings that whole or float weights come by: field, value, and the value that it would have to have."""
    params = config.fsdpturbo_params
    for field, value, fix in (
        ("init_config", config.init_params.name, "init_on_meta"),
        ("dcp_path", params.dcp_path, None),
        ("offload_params", params.offload_params, False),
        ("ep_backend", params.ep_backend, "torch"),
    ):
        if value != fix:
            yield field, value, fix


def choose_weights(model: Any, filling: Filling) -> None:
    """Choose what is packed of a model without adapters: linear layers but routers, and stacks of experts.

    Raises:
        ValueError: as ``filling.choose``.
    """
    experts = find_experts(model, 1)
    counts = {module.get_parameter(name).shape[0] for module in experts.values() for name in stack_names(module)}
    below = (child for router in find_routers(model, tuple(experts)).values() for child in router.modules())
    routers = {child for child in below if isinstance(child, nn.Linear) and child.out_features in counts}
    stacks = {name: stack_names(module) for name, module in experts.items()}
    filling.choose(model, stacks, routers)


def replace_weights(base: nn.Module, filling: Filling, adapted: bool) -> None:
    """Put bytes in their place, after adapters were added; what a trained copy is made of stays in full."""
    filling.replace(trained_copies(base) if adapted else ())


def route_packed_alone(base: Any, dispatcher: str, compute: torch.dtype | None) -> list[str]:
    """In one process, put our expert block into experts with quantised weights; returns their names.

    Args:
        base: the model, adapters in their places.
        dispatcher: of a run of one process.
        compute: dtype to compute in, None: in which weights were stored.
    """
    routed = []
    for name, module in find_experts(base, 1).items():
        experts = base_module(module)
        if not has_packed_experts(experts):
            continue
        num_experts = next(iter(experts.parameters())).shape[0]
        view = PackedExperts(module, getattr(experts, called_by(experts)), num_experts)
        view.compute_as = compute
        brings = get_dispatcher(dispatcher)(None, num_experts)
        setattr(module, called_by(experts), RoutedForward(view, brings, name))
        routed.append(name)
    return routed
