"""Checkpoints that plain Trainer (Transformers', TRL's, with accelerate) wrote: found, checked, their optimizer read.

    model.safetensors or an index with its files (or pytorch_model.bin), or adapters   weights, whole
    optimizer.pt, optimizer.bin   a whole optimizer: states by the parameter's number, or by its name
    scheduler.pt  trainer_state.json

Numbers count parameters in the order in which plain Trainer groups them: with weight decay, then without.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from hf_fsdpturbo.checkpoint import commit, dcp, intact
from hf_fsdpturbo.checkpoint.hub import INDEX, SINGLE
from hf_fsdpturbo.sharding.expert_lora import expert_factors, to_expert_first
from hf_fsdpturbo.sharding.outer_fsdp import reshard
from hf_fsdpturbo.shards import copy_full_tensor_

BINARY, BINARY_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
STATE = "trainer_state.json"


def _files(directory: str, names: tuple[str, ...]) -> list[str]:
    return [path for name in names if os.path.isfile(path := os.path.join(directory, name))]


def has_weights(directory: str) -> bool:
    """Whether weights or adapters lie in a checkpoint as plain Trainer writes them."""
    if _files(directory, (SINGLE, INDEX, BINARY, BINARY_INDEX, *ADAPTERS)):
        return True
    # PEFT writes an adapter that is not named "default" into a folder of its name.
    below = os.scandir(directory) if os.path.isdir(directory) else ()
    return any(_files(entry.path, ADAPTERS) for entry in below if entry.is_dir())


def is_plain(directory: str) -> bool:
    """Whether a checkpoint holds such weights and no shards of ours."""
    return has_weights(directory) and not os.path.isdir(os.path.join(directory, dcp.DCP_DIR))


def is_whole(directory: str) -> bool:
    """Whether a checkpoint without our mark can be taken: every file of an index, and the state, written last."""
    if not is_plain(directory) or not _files(directory, (STATE,)):
        return False
    shards = {
        name
        for index in _files(directory, (INDEX, BINARY_INDEX))
        for name in commit.read_json(index)["weight_map"].values()
    }
    return all(os.path.isfile(os.path.join(directory, name)) for name in shards)


def check_record(directory: str, checksums: bool = True) -> None:
    """Compare what is not weights with our mark, where there is one: weights may have been cut into other files.

    Raises:
        ValueError: a file is missing, truncated or changed; names it.
    """
    if commit.is_finished(directory):
        record = intact.marker_of(os.path.join(directory, commit.COMPLETE))
        for name, size in record["files"].items():
            if not name.startswith(("model", "pytorch_model")):
                intact.check_file(directory, name, size, record["hashes"].get(name) if checksums else None)


def optimizer_file(directory: str) -> str | None:
    """The file of a whole optimizer; None where there is none (only weights were saved, or it is in shards)."""
    return next(iter(_files(directory, OPTIMIZERS)), None)


def read_optimizer(path: str, model: nn.Module, decayed: set[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Groups, with their parameters by name, and states by parameter name; tensors are mapped, not read.

    Args:
        path: ``optimizer.pt`` or ``optimizer.bin``.
        model: the (sharded) model, whose trainable parameters are counted as plain Trainer counts them.
        decayed: names of parameters with weight decay.

    Raises:
        ValueError: other groups than plain Trainer makes of this model; names the file and both counts.
    """
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict) or not {"state", "param_groups"} <= content.keys():
        raise ValueError(f"{path} holds no optimizer state (keys state and param_groups). Copy the checkpoint again.")
    groups, state = content["param_groups"], content["state"]
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        return groups, state
    names = dcp.parameter_names(model)
    trainable = [(name, names[p]) for name, p in model.named_parameters() if p.requires_grad]
    mine = [[own for name, own in trainable if (name in decayed) is decay] for decay in (True, False)]
    counts = [[len(group["params"]) for group in groups], [len(group) for group in mine]]
    if counts[0] != counts[1]:
        raise ValueError(
            f"{path} has groups of {counts[0]} parameters, but plain Trainer makes {counts[1]} of this model (with "
            "weight decay, without). Resume with the model and the peft_config that were trained, or give the "
            "checkpoint as the model's path to start a new run from its weights."
        )
    by_number: dict[Any, str] = {}
    for group, part in zip(groups, mine, strict=True):
        by_number.update(zip(group["params"], part, strict=True))
    named = [{**group, "params": [by_number[key] for key in group["params"]]} for group in groups]
    return named, {by_number[key]: values for key, values in state.items()}


def fill_optimizer(
    path: str, groups: list[dict[str, Any]], state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Copy hyperparameters and states into a sharded optimizer, each rank its own part; collective.

    Raises:
        ValueError: another optimizer, or tensors of other shapes; names file, parameter and state.
    """
    facts = {"groups": [{k: v if k == "params" else dcp.plain(v) for k, v in group.items()} for group in groups]}
    dcp.restore_groups(facts, model, optimizer, path)
    reshard(model)
    get_optimizer_state_dict(model, optimizer)  # makes state tensors of the right placement; their values are replaced
    factors = expert_factors(model)
    for parameter, name in dcp.parameter_names(model).items():
        saved = state.get(name)
        if saved is None:
            optimizer.state.pop(parameter, None)
            continue
        held = optimizer.state[parameter]
        if saved.keys() != held.keys():
            raise ValueError(
                f"optim: {path} keeps {sorted(saved)} of {name}, but {type(optimizer).__name__} keeps {sorted(held)}. "
                "Set optim to the one of the checkpoint."
            )
        for key, value in saved.items():
            held[key] = _filled(held[key], value, factors.get(name), f"{path}: {name} {key}")


def _filled(target: Any, value: Any, factor: str | None, what: str) -> Any:
    if not isinstance(target, Tensor) or not isinstance(value, Tensor):
        return value
    whole = to_expert_first(factor, value, target.shape[0]) if factor is not None and target.ndim == 3 else value
    if tuple(whole.shape) != tuple(target.shape):
        raise ValueError(
            f"{what} has shape {tuple(whole.shape)}, here {tuple(target.shape)}. Resume with the trained model."
        )
    copy_full_tensor_(target, whole)
    return target
