"""Model and optimizer as tensors of a DCP directory, and back in place at any topology.

Keys of the DCP directory: ``model.<name>`` and ``optim.<parameter name>.<state>``; what is not a tensor (learning
rates, plain numbers) lies beside it in ``optimizer.json``. Names are those of the unsharded model: topology is no part
of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from hf_fsdpturbo.checkpoint import unused
from hf_fsdpturbo.checkpoint.commit import read_json, write_json
from hf_fsdpturbo.checkpoint.dcp_index import SavedTensor
from hf_fsdpturbo.checkpoint.dcp_read import SavedDirectory
from hf_fsdpturbo.checkpoint.fresh_state import make_state
from hf_fsdpturbo.ranks import together
from hf_fsdpturbo.sharding.outer_fsdp import reshard

DCP_DIR = "dcp"
OPTIMIZER_JSON = "optimizer.json"
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
# How an optimizer runs, not what it computes: these stay as the new run has them.
_RUN_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable", "maximize")


def model_tensors(model: nn.Module, trainable_only: bool = False) -> dict[str, Tensor]:
    """Model tensors (parameters and persistent buffers) by name, sharing memory with the model.

    Args:
        trainable_only: leave out frozen parameters (adapters on a frozen base).
    """
    reshard(model)
    options = StateDictOptions(ignore_frozen_params=trainable_only)
    return cast(dict[str, Tensor], get_model_state_dict(model, options=options))


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Name of each parameter as :func:`model_tensors` has it."""
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        names[parameter] = name
    return names


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Tensors of the optimizer's state by key ``<parameter name>.<state>``, sharing memory with it."""
    names = parameter_names(model)
    return {
        f"{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def plain(value: Any) -> Any:
    """Hyperparameters as JSON types; a learning rate may be a tensor."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"An optimizer's hyperparameter {value!r} ({type(value).__name__}) cannot be saved as JSON.")


def optimizer_facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What of an optimizer is not a tensor: its class, groups with their parameters' names, plain state values."""
    names = parameter_names(model)
    groups = [
        {
            "params": [names[parameter] for parameter in group["params"]],
            **{key: plain(value) for key, value in group.items() if key not in _RUN_OPTIONS},
        }
        for group in optimizer.param_groups
    ]
    plain_state = {
        names[parameter]: {key: plain(value) for key, value in state.items() if not isinstance(value, Tensor)}
        for parameter, state in optimizer.state.items()
    }
    return {
        "class": type(optimizer).__name__,
        "groups": groups,
        "plain_state": {name: values for name, values in plain_state.items() if values},
    }


def gather_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, trainable_only: bool = False
) -> dict[str, Tensor]:
    """Everything that goes into the DCP directory, by key; nothing is copied."""
    state = {f"model.{name}": tensor for name, tensor in model_tensors(model, trainable_only).items()}
    if optimizer is not None:
        state |= {f"optim.{key}": tensor for key, tensor in optimizer_tensors(model, optimizer).items()}
    return state


def write_optimizer_json(model: nn.Module, optimizer: torch.optim.Optimizer, directory: str) -> None:
    """Write ``optimizer.json``; one rank does it."""
    write_json(os.path.join(directory, OPTIMIZER_JSON), optimizer_facts(model, optimizer))


def saved_tensors(opened: SavedDirectory, prefix: str) -> dict[str, SavedTensor]:
    """Tensors of a directory under a key prefix, by the rest of their key."""
    return {key.removeprefix(prefix): tensor for key, tensor in opened.tensors.items() if key.startswith(prefix)}


def check_fit(
    directory: str, saved: dict[str, SavedTensor], wanted: dict[str, Tensor], *, same_dtype: bool = True
) -> None:
    """Compare names, shapes and dtypes of a checkpoint with those of the model.

    Raises:
        ValueError: naming the directory and up to five keys.
    """
    faults = {
        "missing": sorted(wanted.keys() - saved.keys()),
        "unexpected": sorted(saved.keys() - wanted.keys()),
        "of another shape": [
            f"{name} (saved {saved[name].size}, here {tuple(tensor.shape)})"
            for name, tensor in wanted.items()
            if name in saved and saved[name].size != tuple(tensor.shape)
        ],
        "of another dtype": [
            f"{name} (saved {saved[name].dtype}, here {tensor.dtype})"
            for name, tensor in wanted.items()
            if same_dtype and name in saved and saved[name].dtype != tensor.dtype
        ],
    }
    found = {kind: keys for kind, keys in faults.items() if keys}
    if found:
        text = "; ".join(f"{kind}: {keys[:5]}{' and more' if len(keys) > 5 else ''}" for kind, keys in found.items())
        raise ValueError(f"The checkpoint {directory} belongs to another model or other settings. {text}.")


def load_model(opened: SavedDirectory, model: nn.Module, trainable_only: bool = False) -> None:
    """Fill the model in place from a checkpoint of the same model, whatever its topology was; collective."""
    with together(f"checking {opened.directory}"):
        wanted = model_tensors(model, trainable_only)
        check_fit(opened.directory, saved_tensors(opened, "model."), wanted)
        unused.adopt(model, os.path.dirname(os.path.abspath(opened.directory)))
    opened.read_into({f"model.{name}": tensor for name, tensor in wanted.items()})


def load_optimizer(
    opened: SavedDirectory, facts_path: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Fill the optimizer's state in place, and its hyperparameters, from a checkpoint of any topology; collective.

    Raises:
        CheckpointError: another optimizer class, other parameters, or unreadable files; on every rank.
    """
    with together(f"checking {opened.directory}"):
        facts = read_json(facts_path)
        _check_class(facts, optimizer, facts_path)
        restore_groups(facts, model, optimizer, facts_path)
        saved = saved_tensors(opened, "optim.")
    reshard(model)
    if not make_state(optimizer):
        get_optimizer_state_dict(model, optimizer)  # makes state tensors of the right placement, all at once
    with together(f"checking {opened.directory}"):
        wanted = _keep_saved(model, optimizer, saved, facts)
        check_fit(opened.directory, saved, wanted)
    opened.read_into({f"optim.{key}": tensor for key, tensor in wanted.items()})


def _check_class(facts: dict[str, Any], optimizer: torch.optim.Optimizer, path: str) -> None:
    if facts["class"] != type(optimizer).__name__:
        raise ValueError(
            f"optim: {path} was written by {facts['class']}, but this run uses {type(optimizer).__name__}. Set optim "
            "to the one of the checkpoint."
        )


def restore_groups(facts: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Hyperparameters by parameter name: groups may be split differently here, but not mix what was apart."""
    saved = {name: group for group in facts["groups"] for name in group["params"]}
    names = parameter_names(model)
    for group in optimizer.param_groups:
        mine = [names[parameter] for parameter in group["params"]]
        if unknown := [name for name in mine if name not in saved]:
            raise ValueError(f"{path} has no optimizer state for {unknown[:5]}: other parameters were trained then.")
        for key in (key for key in group if key not in _RUN_OPTIONS):
            values = [saved[name].get(key) for name in mine]
            if any(value != values[0] for value in values):
                raise ValueError(f"{path}: {key} differs inside one of this run's optimizer groups: {mine[:5]}.")
            if not values:
                continue
            if isinstance(group[key], Tensor):
                group[key].fill_(values[0])
            else:
                group[key] = tuple(values[0]) if isinstance(group[key], tuple) else values[0]
        for key in saved[mine[0]] if mine else ():
            if key not in group and key not in _RUN_OPTIONS:
                group[key] = saved[mine[0]][key]  # such as initial_lr, which a scheduler adds


def _keep_saved(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Iterable[str], facts: dict[str, Any]
) -> dict[str, Tensor]:
    """Parameters that had no state when saved (never a gradient) have none again; the rest is to be read."""
    with_state = {key.rsplit(".", 1)[0] for key in saved} | set(facts["plain_state"])
    for parameter, name in parameter_names(model).items():
        if name not in with_state:
            optimizer.state.pop(parameter, None)
        elif parameter in optimizer.state:
            optimizer.state[parameter].update(facts["plain_state"].get(name, {}))
    return optimizer_tensors(model, optimizer)
