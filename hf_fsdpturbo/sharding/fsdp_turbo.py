"""``ep_backend: fsdp_turbo``: hand EP and EFSDP of the experts to the FSDPTurbo library, and correct its faults.

L / E local / all experts. The one file that imports ``fsdp_turbo``, late and from its defining modules. The library
has two generations of its API (OLD, about July 2026, and NEW); what differs is read from its dataclasses, never
guessed.

Note [What is corrected]: frozen experts become trainable (flags are restored); with one expert a rank, or a model made
on meta, the expert id table is missing or garbage (rebuilt); with no divide factor, or EFSDP left out at size 1,
expert gradients are ep times too large (the factor is explicit, and EFSDP is ours where the library made none); its
default EFSDP target is the whole MoE block, whose router is then never reduced over ep (experts only, by full name);
its bf16 policy is fixed, also for fp32 runs, and it shards the fused gate/up dim, which loads permuted weights when
the model is on meta (EFSDP is ours in both cases, and says so); it makes every collective of the process synchronous
(put back).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from hf_fsdpturbo.arguments import FSDPTurboParams
from hf_fsdpturbo.compat import gradient_divide_factor_method, has_force_sum_reduction, require, torch_release
from hf_fsdpturbo.model_spec import name_matches
from hf_fsdpturbo.sharding.expert_fsdp import fully_shard_experts
from hf_fsdpturbo.sharding.expert_parallel import is_plain_swiglu

CONFIG = "fsdp_turbo.fsdp_turbo_config"
EXPERT_PARALLEL = "fsdp_turbo.distributed.expert_parallel.expert_parallel"
EXPERT_FSDP = "fsdp_turbo.distributed.expert_parallel.expert_fully_shard_parallel"
DEVICE = "fsdp_turbo.utils.device"
DISPATCHERS = ("eager", "fused", "mc2", "domino")  # all that both ends know; "auto" is ours alone
FACTOR_FIELDS = ("gradient_divide_factor", "_gradient_divide_factor")  # NEW, OLD
CUSTOM_TORCH = ((2, 9), (2, 11))  # the releases whose private FSDP modules fsdp_implementation=custom subclasses
_PATCHED = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")


def check_upstream(params: FSDPTurboParams, model: nn.Module, device_type: str) -> list[str]:
    """Refuse, on every rank, everything that can be refused before the first collective.

    Returns:
        Notes for the summary.

    Raises:
        ValueError: names field, value, rule and fix; MissingDependencyError for the library itself.
    """
    require("fsdp_turbo", "dist_config ep_backend='fsdp_turbo'")
    ep_plan, _ = _plan_classes()
    divide_factor_field(ep_plan)
    if params.ep_dispatcher not in DISPATCHERS:
        raise ValueError(
            f"dist_config ep_dispatcher={params.ep_dispatcher!r} is not a dispatcher of fsdp_turbo. Use one of "
            f"{DISPATCHERS}, or ep_backend='torch'."
        )
    if params.ep_dispatcher == "mc2" and device_type != "npu":
        raise ValueError(
            f"dist_config ep_dispatcher='mc2' with ep_backend='fsdp_turbo' on {device_type}: the library falls back "
            "to wrong maths without gradients there. Use another dispatcher."
        )
    notes = _check_implementation(params)
    for pattern in params.hook_modules:
        if not any(name_matches(pattern, name) for name, _ in model.named_modules()):
            raise ValueError(
                f"dist_config hook_modules: the pattern {pattern!r} matches no module of {type(model).__name__}. Use "
                "names as model.named_modules() gives them."
            )
    return notes


def _check_implementation(params: FSDPTurboParams) -> list[str]:
    if params.fsdp_implementation == "native":
        unused = "hook_modules has no effect with fsdp_implementation='native' (the library drops it)"
        return [unused] if params.hook_modules else []
    low, high = CUSTOM_TORCH
    if not low <= torch_release() <= high:
        raise ValueError(
            f"dist_config fsdp_implementation='custom' subclasses private parts of torch {low[0]}.{low[1]} to "
            f"{high[0]}.{high[1]}, but torch is {torch.__version__}. Use 'native'."
        )
    return ["fsdp_implementation='custom' inside a native root is untested: compare a short run with 'native'"]


def _plan_classes() -> tuple[type, type]:
    config = importlib.import_module(CONFIG)
    return config.EPPlanConfig, config.FSDPPlanConfig


def _fields(plan: type) -> set[str]:
    return {field.name for field in dataclasses.fields(plan)}


def divide_factor_field(ep_plan: type) -> str:
    """What this generation calls the divide factor. Setting the other name on its dataclass would be silent.

    Raises:
        ValueError: the library has neither field.
    """
    for name in FACTOR_FIELDS:
        if name in _fields(ep_plan):
            return name
    raise ValueError(
        f"This fsdp_turbo has no {' or '.join(FACTOR_FIELDS)} in EPPlanConfig, so expert gradients would be scaled "
        "wrongly. Install the pinned revision: pip install --no-deps -r requirements/fsdpturbo.txt"
    )


def _ep_plan(names: list[str], dispatcher: str, divide_factor: int) -> Any:
    plan, _ = _plan_classes()
    return plan(
        apply_modules=list(names), apply_efsdp_modules=list(names), dispatcher=dispatcher,
        **{divide_factor_field(plan): divide_factor},
    )  # fmt: skip


def expert_parallelize(
    model: nn.Module,
    names: list[str],
    ep_mesh: DeviceMesh,
    *,
    dispatcher: str,
    divide_factor: int,
    device: torch.device,
) -> None:
    """Shard experts modules over ep with the library; their forwards become its dispatcher.

    Parameters keep their ``requires_grad``.

    Args:
        model: that has them.
        names: full names of the experts modules.
        ep_mesh: one axis.
        dispatcher: a name in ``DISPATCHERS``.
        divide_factor: dp_size * cp_size.
        device: where the run computes.

    Raises:
        ValueError: experts of another layout than the library's dispatchers compute, or the library refuses.
    """
    modules = {name: model.get_submodule(name) for name in names}
    for name, module in modules.items():
        if not is_plain_swiglu(module):
            raise ValueError(
                f"{name} ({type(module).__name__}): ep_backend='fsdp_turbo' computes only SwiGLU experts with "
                "gate_up_proj [E, 2F, D] and down_proj [E, D, F] and no bias. Use ep_backend='torch'."
            )
    if dispatcher == "domino" and not hasattr(torch.accelerator, "Stream"):
        # Stock torch (2.7 to 2.13) has no torch.accelerator.Stream, torch_npu may bring one; the library ships a
        # substitute that nobody switches on.
        importlib.import_module(DEVICE).set_accelerator_compatible()
    trainable = {(name, key): p.requires_grad for name, m in modules.items() for key, p in m.named_parameters()}
    library = importlib.import_module(EXPERT_PARALLEL)
    try:
        library.expert_parallelize_modules(model, ep_mesh, _ep_plan(names, dispatcher, divide_factor))
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"fsdp_turbo refused expert parallelism with ep_dispatcher={dispatcher!r} on {device.type}: {error} "
            "Use ep_backend='torch', or another dispatcher."
        ) from error
    for name, module in modules.items():
        for key, parameter in module.named_parameters():
            parameter.requires_grad_(trainable[name, key])
        num_experts = next(module.parameters()).shape[0]  # of the DTensor: all experts, E
        ids = torch.arange(num_experts, device=device, dtype=torch.int32)
        module.expert_ids_per_ep_rank = ids % (num_experts // ep_mesh.size())


def why_own_efsdp(model: nn.Module, names: list[str], mesh: DeviceMesh, options: dict[str, Any]) -> str | None:
    """Why EFSDP must be ours even with ep_backend fsdp_turbo, or None where the library's gives the same result."""
    if options["mp_policy"].param_dtype != torch.bfloat16:
        return "the library computes experts in bf16 whatever the run's dtype"
    parameters = [p for name in names for p in model.get_submodule(name).parameters()]
    if mesh.size(mesh.ndim - 1) > 1 and any(p.is_meta for p in parameters):
        return "the library shards the fused gate/up dim, under which a model on meta loads permuted weights"
    return None


def expert_fully_shard(
    model: nn.Module,
    names: list[str],
    mesh: DeviceMesh,
    *,
    params: FSDPTurboParams,
    divide_factor: int,
    num_local_experts: int,
    options: dict[str, Any],
) -> list[str]:
    """EFSDP of experts modules after :func:`expert_parallelize`: the library's where right, ours elsewhere.

    Afterwards every experts module is FSDP-managed and divides by dp * cp.

    Args:
        model: that has them.
        names: full names of the experts modules.
        mesh: shard axis over (efsdp, expert_cp), with a replicate axis before it or none; also of one rank.
        params: what the user set.
        divide_factor: dp_size * cp_size.
        num_local_experts: L.
        options: of ``fully_shard``.

    Returns:
        Notes for the summary.

    Raises:
        ValueError: ``fsdp_implementation='custom'`` was asked for and EFSDP has to be ours, or the library wrapped
            more than the experts, or lacks a field that a setting needs.
    """
    reason = why_own_efsdp(model, names, mesh, options)
    if reason is not None and params.fsdp_implementation == "custom":
        raise ValueError(
            f"dist_config fsdp_implementation='custom' cannot take effect: {reason}, so EFSDP is ours. Use 'native', "
            "or a bf16 run on a model that is already loaded."
        )
    if reason is None:
        _librarys_efsdp(model, names, mesh, _ep_plan(names, params.ep_dispatcher, divide_factor), _fsdp_plan(params))
    missing = []
    for name in names:
        module = model.get_submodule(name)
        if not isinstance(module, FSDPModule):
            missing.append(name)
            fully_shard_experts(
                module, mesh, num_local_experts=num_local_experts, divide_factor=divide_factor, options=options
            )
            continue
        getattr(module, gradient_divide_factor_method())(float(divide_factor))
        if mesh.size(mesh.ndim - 1) > 1 and has_force_sum_reduction():
            module.set_force_sum_reduction_for_comms(True)
        module.set_reshard_after_forward(options.get("reshard_after_forward", True))
    if not missing:
        return []
    why = reason or "the library wrapped nothing"
    return [f"ep_backend fsdp_turbo: EFSDP of {len(missing)} experts modules is ours, because {why}"]


def _librarys_efsdp(model: nn.Module, names: list[str], mesh: DeviceMesh, ep_plan: Any, fsdp_plan: Any) -> None:
    before = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    with _collectives_kept():
        importlib.import_module(EXPERT_FSDP).expert_fully_shard_modules(model, mesh, ep_plan, fsdp_plan)
    wrapped = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)} - before
    if extra := sorted(wrapped - set(names)):
        raise ValueError(
            f"This fsdp_turbo wrapped more than the experts it was told to: {extra}. Their routers would never be "
            "reduced over ep. Install the pinned revision, or use ep_backend='torch'."
        )


def _fsdp_plan(params: FSDPTurboParams) -> Any:
    _, plan = _plan_classes()
    wanted = {
        "apply_modules": {}, "hook_modules": list(params.hook_modules),
        "fsdp_implementation": params.fsdp_implementation, "cpu_offload": params.offload_params,
        "pin_memory": params.pin_memory,
    }  # fmt: skip
    unknown = [n for n, v in wanted.items() if n not in _fields(plan) and v not in ({}, [], False, "native")]
    if unknown:
        raise ValueError(
            f"This fsdp_turbo has no {unknown} in FSDPPlanConfig. Leave them out, or install the pinned revision."
        )
    return plan(**{name: value for name, value in wanted.items() if name in _fields(plan)})


@contextlib.contextmanager
def _collectives_kept() -> Iterator[None]:
    """Undo the library's patch of torch.distributed, which waits for every handle: forced sums need no PREMUL_SUM.

    Where torch cannot force sums (before 2.9) the patch has to stay.
    """
    before = {name: getattr(dist, name) for name in _PATCHED}
    try:
        yield
    finally:
        if has_force_sum_reduction():
            for name, function in before.items():
                setattr(dist, name, function)
