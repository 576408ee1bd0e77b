"""The one place that knows the order: kernels, context parallel, experts (EP), EFSDP, outer FSDP2.

whole model (usually on meta)
  -> apply_kernels          functions and forwards that compute the same, faster
  -> context_parallel       sequence cut at the base model's entry, gathered at its exit
  -> shard_experts           experts Shard(0) on ep, forward goes through the dispatcher
  -> fully_shard_experts     their parameters over (efsdp, expert_cp), replicated over edp
  -> install_recompute       activation checkpointing replays routing, and keeps what is asked
  -> compute_as_autocast     bf16 runs: autocast round the model, as plain Trainer has it
  -> outer_fully_shard       every decoder layer and the root over all ranks, the experts left out
  -> TowerUse                batches may have images: zero gradients for ranks without
  -> check_ownership         every parameter is managed once
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from hf_fsdpturbo.context_parallel.exactness import check_model as check_context_parallel
from hf_fsdpturbo.context_parallel.install import install as install_context_parallel
from hf_fsdpturbo.images import TowerUse, beside_text, why_not
from hf_fsdpturbo.kernels.apply import KernelReport, apply_kernels
from hf_fsdpturbo.loading.heads import FRESH_HEADS
from hf_fsdpturbo.model_spec import find_experts
from hf_fsdpturbo.packing.prepared_masks import keep_documents_apart
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState, Topology
from hf_fsdpturbo.parallelize.autocast import compute_as_autocast, compute_rows_in, float32_parameters
from hf_fsdpturbo.parallelize.fused_experts import dispatcher_alone, route_in_one_process
from hf_fsdpturbo.parallelize.ignored_modules import check_patterns, ignored_parameters
from hf_fsdpturbo.parallelize.kept_activations import install_recompute
from hf_fsdpturbo.parallelize.quantise import route_packed_alone
from hf_fsdpturbo.parallelize.routed_experts import expert_options, route_experts
from hf_fsdpturbo.sharding import fsdp_turbo
from hf_fsdpturbo.sharding.expert_fsdp import check_expert_shards, frozen_bytes
from hf_fsdpturbo.sharding.expert_parallel import check_experts, shared_by_experts
from hf_fsdpturbo.sharding.outer_fsdp import (
    check_ownership,
    check_ties,
    outer_fully_shard,
    reshard_without_backward,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_fsdpturbo.arguments import FSDPTurboArguments


@dataclass
class ShardingReport:
    """What was done, for the summary that rank 0 prints; ``fused_alone`` counts expert modules of one process.

    ``no_images`` says why batches with images are refused, None where they are not.
    """

    topology: dict[str, int]
    dispatcher: str
    expert_modules: int = 0
    num_experts: int = 0
    expert_parameters: int = 0
    ignored_parameters: int = 0
    dense_units: int = 0
    fused_alone: int = 0
    notes: list[str] = field(default_factory=list)
    kernels: KernelReport | None = None
    no_images: str | None = None

    def __str__(self) -> str:
        lines = [", ".join(f"{name}={size}" for name, size in self.topology.items())]
        if self.expert_modules:
            lines.append(
                f"{self.expert_modules} expert modules of {self.num_experts} experts, dispatcher {self.dispatcher}, "
                f"{self.ignored_parameters} ignored EP parameters in {self.dense_units} outer units"
            )
        elif self.dense_units:
            lines.append(f"no expert modules, {self.dense_units} outer units")
        lines += [*(self.kernels.lines if self.kernels else []), *self.notes]
        return "\n".join(f"[hf_fsdpturbo] {line}" for line in lines)


def fsdp_options(args: FSDPTurboArguments, model: nn.Module | None = None) -> dict[str, Any]:
    """Arguments of ``fully_shard`` for the outer units: bf16 compute, float32 reduction when ``bf16``.

    Without ``bf16`` everything is as stored, but a ``model`` stored in half precision is reduced in float32 too.
    """
    params = args.fsdpturbo_params
    policy = MixedPrecisionPolicy()
    if getattr(args, "bf16", False):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    elif half_precision(model):
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": params.reshard_after_forward}
    if params.offload_params:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=params.pin_memory)
    return options


def half_precision(model: nn.Module | None) -> str | None:
    """Name of a half-precision dtype that parameters are stored in, if there are such."""
    stored = {parameter.dtype for parameter in model.parameters()} if model is not None else set()
    return next((str(dtype) for dtype in (torch.bfloat16, torch.float16) if dtype in stored), None)


def check_model(
    model: PreTrainedModel, args: FSDPTurboArguments, state: FSDPTurboParallelState
) -> tuple[dict[str, int], list[str]]:
    """Sizes of the model against the meshes, before anything is changed.

    Returns the number of experts by module name, and notes for the summary.

    Raises:
        ValueError: naming field, value, rule, layer.
    """
    sizes, params = state.topology, args.fsdpturbo_params
    counts: dict[str, int] = {}
    notes: list[str] = []
    if sizes.cp_size > 1:
        check_context_parallel(model, sizes.cp_size)
    for name, module in find_experts(model, sizes.ep_size).items():
        counts[name] = check_experts(module, name, sizes.ep_size)
        check_expert_shards(module, name, counts[name] // sizes.ep_size, sizes.expert_shard_size)
    if params.ep_backend == "fsdp_turbo":
        notes += fsdp_turbo.check_upstream(params, model, state.device_type)
    check_ties(model)
    check_patterns(model, params.fsdp_ignored_modules, _parameters(model, counts))
    if not getattr(args, "bf16", False) and (stored := half_precision(model)):
        notes.append(
            f"bf16=False, but parameters are stored in {stored}: they compute in it, and are reduced in float32. "
            "Set bf16=True, or load the model in float32"
        )
    return counts, notes


def nodes_in_words(sizes: Topology, dispatcher: str) -> list[str]:
    """What the summary says of nodes: nothing where experts never leave one, or go as the dispatcher always does."""
    if dispatcher not in ("fused", "auto"):
        return []
    if sizes.ep_nodes > 1:
        near = sizes.ep_size // sizes.ep_nodes
        return [f"fused exchanges over {sizes.ep_nodes} nodes of {near} ranks: a token goes once to a node"]
    if sizes.splits_ep_unevenly:
        part = math.gcd(sizes.ep_size * sizes.cp_size, sizes.ranks_per_node)  # a part of a node is near itself too
        fix = f" Set ranks_per_node={part} for two" if replace(sizes, ranks_per_node=part).ep_nodes > 1 else ""
        return [
            f"ep_size={sizes.ep_size} with cp_size={sizes.cp_size} does not split evenly over nodes of "
            f"{sizes.ranks_per_node} ranks: fused exchanges in one stage, a token goes once to each rank.{fix}"
        ]
    return []


def parallelize_model(
    model: PreTrainedModel,
    args: FSDPTurboArguments,
    state: FSDPTurboParallelState,
    *,
    head_unit: bool = False,
    with_images: bool = False,
) -> tuple[PreTrainedModel, ShardingReport]:
    """Shard a model in place, whole on meta or on any device, over the meshes of ``state``.

    ``head_unit``: the LM head may be a unit, since nobody reads its weight outside its forward. ``with_images``: some
    batches may have images (or sound), on some ranks.

    Raises:
        ValueError: sizes that do not fit the model.
        RuntimeError: a parameter is managed twice or not at all.
    """
    params = args.fsdpturbo_params
    report = ShardingReport(state.topology.to_dict(), params.ep_dispatcher)
    counts, notes = check_model(model, args, state)
    report.notes += notes
    if counts and params.ep_backend == "torch":
        report.notes += nodes_in_words(state.topology, params.ep_dispatcher)
    cp_size, length = state.topology.cp_size, getattr(args, "max_length", None)  # max_length: TRL's
    report.kernels = apply_kernels(model, args.kernel_params, state.device_type, cp_size, length)
    if state.topology.cp_size > 1:
        install_context_parallel(model, state.cp_mesh)
    else:
        keep_documents_apart(model)
    options = fsdp_options(args, model)
    unmanaged: set[nn.Parameter] = set()
    if params.ep_backend == "fsdp_turbo" and counts:
        report.notes += _route_upstream(model, counts, args, state, options)
    else:
        for name, num_experts in counts.items():
            module = model.get_submodule(name)
            experts = route_experts(module, num_experts, params.ep_dispatcher, state, options, name)
            if experts.gradient_divisor is not None:
                unmanaged.update(module.parameters())
            unmanaged |= shared_by_experts(module)
            if state.expert_fsdp_mesh.size(state.expert_fsdp_mesh.ndim - 1) == 1:
                unmanaged |= frozen_bytes(module)
        report.notes += install_recompute(model, args, state.topology, counts, params.ep_dispatcher)
    ignored = _parameters(model, counts)
    report.num_experts = max(counts.values(), default=0)
    report.expert_modules, report.ignored_parameters = len(counts), len(ignored)
    report.expert_parameters = sum(parameter.numel() for parameter in ignored)
    free = ignored_parameters(model, params.fsdp_ignored_modules) - ignored
    compute = options["mp_policy"].param_dtype
    float32 = float32_parameters(model, compute)
    compute_as_autocast(model, state.device_type, compute)
    report.no_images = why_not(model, counts, state.topology.cp_size, with_images)
    images = beside_text(model) if report.no_images is None else None
    units = outer_fully_shard(
        model,
        state.dense_mesh,
        ignored=ignored | free,
        options=options,
        root_options=_root_options(model, options),
        float32=float32,
        head_unit=head_unit,
        in_root=images.parameters if images is not None else (),
    )
    if images is not None:
        TowerUse(model, images, torch.device(state.device_type))
        report.notes.append(f"images: {', '.join(images.towers)} in the root unit, whole on every rank in a step")
    report.dense_units = len(units.names)
    check_ownership(model, free | unmanaged | units.whole)
    model.register_forward_hook(reshard_without_backward)
    model._is_accelerate_prepared = True  # accelerate then passes it through untouched: no DDP, no autocast, no .to()
    model._is_fsdp_managed_module = True  # generate() then keeps all ranks in step until the last one is done
    return model, report


def _route_upstream(
    model: nn.Module,
    counts: dict[str, int],
    args: FSDPTurboArguments,
    state: FSDPTurboParallelState,
    options: dict[str, Any],
) -> list[str]:
    """EP and EFSDP by the fsdp_turbo library; returns notes for the summary."""
    params, topology, names = args.fsdpturbo_params, state.topology, list(counts)
    factor = topology.dp_size * topology.cp_size
    fsdp_turbo.expert_parallelize(
        model, names, state.ep_mesh, dispatcher=params.ep_dispatcher, divide_factor=factor, device=args.device
    )
    for name in names:
        compute_rows_in(model.get_submodule(name), options["mp_policy"].param_dtype)
    return fsdp_turbo.expert_fully_shard(
        model,
        names,
        state.expert_fsdp_mesh,
        params=params,
        divide_factor=factor,
        num_local_experts=counts[names[0]] // topology.ep_size,
        options=expert_options(options),
    )


def prepare_one_process(model: PreTrainedModel, args: FSDPTurboArguments, topology: Topology) -> ShardingReport:
    """Kernels, our expert block and routing tape of a run of one process; accelerate prepares the model as usual."""
    report = ShardingReport(topology.to_dict(), "none")
    report.kernels = apply_kernels(
        model, args.kernel_params, args.device.type, length=getattr(args, "max_length", None)
    )
    keep_documents_apart(model)
    dispatcher, note = dispatcher_alone(args)
    packed = route_packed_alone(model, dispatcher, torch.bfloat16 if getattr(args, "bf16", False) else None)
    routed = route_in_one_process(model, dispatcher)
    routed.names += packed
    report.fused_alone = len(routed.names)
    report.notes += [*filter(None, [note]), *routed.lines(dispatcher)]
    report.notes += install_recompute(model, args, topology, routed.names, dispatcher)
    return report


def _root_options(model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Scores leave a classifier in float32, as accelerate returns them: a reward margin is a small difference."""
    policy = options["mp_policy"]
    if policy.param_dtype is None or not any(f"{name}.".startswith(FRESH_HEADS) for name, _ in model.named_children()):
        return {}
    own = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, torch.float32, cast_forward_inputs=False)
    return {"mp_policy": own}


def _parameters(model: nn.Module, names: Iterable[str]) -> set[nn.Parameter]:
    return {parameter for name in names for parameter in model.get_submodule(name).parameters()}


def shard_device(config: FSDPTurboArguments) -> torch.device:
    """Where shards live between uses: on the host with ``offload_params``."""
    return torch.device("cpu") if config.fsdpturbo_params.offload_params else config.device
