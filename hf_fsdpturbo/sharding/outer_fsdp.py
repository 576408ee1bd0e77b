"""Outer FSDP2: every decoder layer and the root over all ranks, leaving out what EFSDP or nobody manages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hf_fsdpturbo.sharding.gradient_copy import copy_large_gradients_by_chunk

# Note [What stays in the root unit]
# Embedding, final norm and lm_head stay in the root: TRL's fused LM head reads lm_head.weight directly, and as a unit
# of its own its gradient would never be reduced (98 % off, silently).


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks to wrap: instances of the classes in ``_no_split_modules``, outermost only, in model order.

    Raises:
        ValueError: the model names none, or has none.
    """
    wanted = set(getattr(model, "_no_split_modules", None) or ())
    chosen: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if type(module).__name__ in wanted and id(module) not in inside:
            chosen.append(module)
            inside.update(id(m) for m in module.modules())
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} names no layer to shard (_no_split_modules={sorted(wanted)}). Set "
            "_no_split_modules on the model class to the name of its decoder layer."
        )
    return chosen


def _odd_dtype_modules(unit: nn.Module, ignored: set[nn.Parameter], done: set[int]) -> list[nn.Module]:
    """Modules of a unit with another dtype than most of it (routers kept in float32): FSDP wants one dtype a unit.

    Trainable and frozen parameters are looked at apart: FSDP reduces trainable ones only, and float32 adapters on a
    frozen bf16 base belong into the unit of their layer.
    """
    count: dict[tuple[bool, torch.dtype], int] = {}
    owners: list[tuple[nn.Module, tuple[bool, torch.dtype]]] = []
    for module in unit.modules():
        for parameter in module.parameters(recurse=False):
            if parameter not in ignored and id(parameter) not in done:
                kind = (parameter.requires_grad, parameter.dtype)
                count[kind] = count.get(kind, 0) + parameter.numel()
                owners.append((module, kind))
    kept = {
        max((kind for kind in count if kind[0] is trainable), key=lambda kind: count[kind])
        for trainable in {kind[0] for kind in count}
    }
    return list(dict.fromkeys(module for module, kind in owners if kind not in kept))


def outer_fully_shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    ignored: set[nn.Parameter],
    options: dict[str, Any],
    root_options: dict[str, Any] | None = None,
) -> list[str]:
    """Shard everything that is not ignored; returns the names of the units.

    Args:
        model: model whose experts are wrapped already.
        mesh: one axis ``fsdp``, or ``(replicate, fsdp)``.
        ignored: parameters somebody else manages.
        options: arguments of ``fully_shard`` (policies, reshard_after_forward).
        root_options: what the root has otherwise.
    """
    copy_large_gradients_by_chunk()
    names = {id(module): name for name, module in model.named_modules()}
    wrapped: list[str] = []
    done: set[int] = set()
    for layer in (*decoder_layers(model), model):
        for odd in _odd_dtype_modules(layer, ignored, done):
            _wrap_in_own_dtype(odd, mesh, ignored, options)
            done.update(id(p) for p in odd.parameters())
            wrapped.append(names[id(odd)])
        if any(p not in ignored and id(p) not in done for p in layer.parameters()):
            # The root's embedding and head are wanted again as soon as backward starts: kept whole until then, as FSDP
            # does by itself. After a forward without backward, the trainer reshards.
            root = {"reshard_after_forward": False, **(root_options or {})}
            own = {**options, **root} if layer is model else options
            fully_shard(layer, mesh=mesh, ignored_params=ignored, **own)
            done.update(id(p) for p in layer.parameters())
            wrapped.append(names[id(layer)] or "(root)")
    if isinstance(model, FSDPModule):
        # Transformers looks models up by class name: Trainer's label smoothing shifts labels for the names it knows.
        type(model).__name__ = type(model).__bases__[1].__name__
    return wrapped


def _wrap_in_own_dtype(
    module: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter], options: dict[str, Any]
) -> None:
    own = {**options, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)}
    fully_shard(module, mesh=mesh, ignored_params=ignored, **own)


def reshard(model: nn.Module) -> None:
    """Drop what forwards without a backward have gathered: after this, parameters are shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reshard_without_backward(model: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of the root: evaluation, generation and references leave no unit whole behind."""
    if not torch.is_grad_enabled():
        reshard(model)


def check_ownership(model: nn.Module, free: set[nn.Parameter]) -> None:
    """Every parameter is managed by exactly one FSDP unit, or is one of ``free``.

    Raises:
        RuntimeError: names of parameters that are managed twice or not at all (a fault of ours, not of the user).
    """
    managed: Counter[tuple[int, str]] = Counter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _parameter_groups(module):
                for fsdp_parameter in group.fsdp_params:
                    info = fsdp_parameter._module_info
                    managed[id(info.module), info.param_name] += 1
                    managed.update(zip(map(id, info.shared_modules), info.shared_param_names, strict=True))
    wrong: dict[str, int] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            count = managed[id(module), name]
            if count != (0 if parameter in free else 1):
                wrong[f"{module_name}.{name}" if module_name else name] = count
    if wrong:
        raise RuntimeError(f"Sharding must manage every parameter once, but these are managed so often: {wrong}.")


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """FSDP's own record of what it manages; torch has no public way to ask, and 2.11 made the attribute a list."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)
