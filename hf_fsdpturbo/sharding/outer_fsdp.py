"""Outer FSDP2: every decoder layer and the root over all ranks, leaving out what EFSDP or nobody manages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hf_fsdpturbo.sharding.expert_lora import name_without_wrappers
from hf_fsdpturbo.sharding.gradient_copy import copy_large_gradients_by_chunk
from hf_fsdpturbo.sharding.unit_dtypes import Group, Split, split_unit

# Note [What stays in the root unit]
# Embedding, final norm and lm_head stay in the root: TRL's fused LM head reads lm_head.weight directly, and as a unit
# of its own its gradient would never be reduced (98 % off, silently). Where ours stands in its place, which calls the
# head as a module (lm_head/fused_head.py), the head is a unit: gathered and reduced beside the layers' work.


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


def check_ties(model: nn.Module) -> None:
    """No parameter is read by two decoder layers, or by a layer and the root: FSDP gathers it in one of them only.

    Ties that Transformers makes after it has loaded (``all_tied_weights_keys``) count as well.

    Raises:
        ValueError: naming two of the places.
    """
    layers = {module: layer for layer in decoder_layers(model) for module in layer.modules()}
    layer_of: dict[str, nn.Module | None] = {}
    first: dict[nn.Parameter, str] = {}
    ties: list[tuple[str, str]] = []
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            here = name_without_wrappers(f"{module_name}.{name}" if module_name else name)
            layer_of[here] = layers.get(module)
            ties.append((first.setdefault(parameter, here), here))
    ties += [(one, other) for other, one in (getattr(model, "all_tied_weights_keys", None) or {}).items()]
    for one, other in ties:
        if one in layer_of and other in layer_of and layer_of[one] is not layer_of[other]:
            raise ValueError(
                f"{type(model).__name__} ties {one} and {other}, which lie in two decoder layers, or in a layer and "
                "outside: one would be read while it is not gathered. Train it in one process."
            )


@dataclass
class OuterUnits:
    """What :func:`outer_fully_shard` made: names of the units, and parameters that stay whole on every rank."""

    names: list[str] = field(default_factory=list)
    whole: set[nn.Parameter] = field(default_factory=set)


def outer_fully_shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    ignored: set[nn.Parameter],
    options: dict[str, Any],
    root_options: dict[str, Any] | None = None,
    float32: set[nn.Parameter] | None = None,
    head_unit: bool = False,
    in_root: Collection[nn.Parameter] = (),
) -> OuterUnits:
    """Shard everything that is not ignored, layer by layer, then what is left of the root.

    Args:
        model: model whose experts are wrapped already.
        mesh: one axis ``fsdp``, or ``(replicate, fsdp)``.
        ignored: parameters somebody else manages.
        options: arguments of ``fully_shard`` (policies, reshard_after_forward).
        root_options: what the root has otherwise.
        float32: parameters that compute in float32 whatever the policy says. Where they are few beside others, small
            ones stay whole on every rank (see unit_dtypes.py), and their gradients must be averaged.
        head_unit: make the LM head a unit where it can be one; whoever uses its weight calls it as a module.
        in_root: parameters whose layers are no units, since not every rank calls them (images/towers.py says why).
    """
    copy_large_gradients_by_chunk()
    units = OuterUnits()
    names = {id(module): name for name, module in model.named_modules()}
    head, managed = _head_weight(model), set(ignored)
    alone = [module for module in [head_alone(model)] if head_unit and module is not None]
    layers = [layer for layer in decoder_layers(model) if not set(layer.parameters()) & set(in_root)]
    for layer in (*layers, *alone, model):
        # The embedding and the head are wanted again as soon as backward starts: kept whole until then, as FSDP does
        # with the root by itself. After a forward without backward, the trainer reshards.
        whole = {"reshard_after_forward": False}
        root = {**whole, **(root_options or {})}
        own = {**options, **root} if layer is model else {**options, **(whole if layer in alone else {})}
        split = split_unit(layer, [p for p in layer.parameters() if p not in managed], float32 or set(), head)
        units.whole |= split.small
        if split.main:
            fully_shard(layer, mesh=mesh, ignored_params=set(layer.parameters()) - split.main, **_policy(own, split))
            units.names.append(names[id(layer)] or "(root)")
        for group in split.large:  # after the layer: FSDP leaves out modules that are units already, with all in them
            others = set(group.block.parameters()) - group.parameters
            fully_shard(group.block, mesh=mesh, ignored_params=others, **_policy(own, group))
            units.names.append(names[id(group.block)])
            _keep_class_name(group.block)
        managed.update(layer.parameters())
    for module in (*alone, model):
        if isinstance(module, FSDPModule):
            _keep_class_name(module)
    return units


def _keep_class_name(module: nn.Module) -> None:
    """Names and module of the class that FSDP made are those of the class it stands for.

    Transformers looks models up by them: label smoothing shifts labels for the names it knows, a class from outside
    its package is initialised otherwise while loading (which moved adapters to another random draw), and what a model
    may record (router logits, for the aux loss) is kept by what ``str`` says of its class.
    """
    own, stands_for = type(module), type(module).__bases__[1]
    own.__name__, own.__qualname__, own.__module__ = (
        stands_for.__name__, stands_for.__qualname__, stands_for.__module__
    )  # fmt: skip


def _policy(options: dict[str, Any], unit: Split | Group) -> dict[str, Any]:
    """The unit's options; float32 parameters are gathered as they are stored."""
    policy = options["mp_policy"]
    if not unit.in_float32:
        return options
    own = MixedPrecisionPolicy(None, policy.reduce_dtype, policy.output_dtype, cast_forward_inputs=False)
    return {**options, "mp_policy": own}


def _head_weight(model: nn.Module) -> nn.Parameter | None:
    find = getattr(model, "get_output_embeddings", None)
    return getattr(find() if find is not None else None, "weight", None)


def head_alone(model: nn.Module) -> nn.Linear | None:
    """The LM head if it can be a unit: a plain ``nn.Linear`` outside decoder layers, not (or not yet) tied."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if type(head) is not nn.Linear or any(head in layer.modules() for layer in decoder_layers(model)):
        return None
    places = [name for name, p in model.named_parameters(remove_duplicate=False) if p is head.weight]
    ties = {name for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items() for name in pair}
    return head if len(places) == 1 and not ties & set(places) else None


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
    for fsdp_parameter in managed_parameters(model):
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


def owner_of(record: Any) -> nn.Module:
    """The module that holds a managed parameter."""
    return record._module_info.module


def managed_parameters(model: nn.Module) -> Iterator[Any]:
    """FSDP's record (``FSDPParam``) of each parameter that it manages."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _parameter_groups(module):
                yield from group.fsdp_params


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """FSDP's own record of what it manages; torch has no public way to ask, and 2.11 made the attribute a list."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)
