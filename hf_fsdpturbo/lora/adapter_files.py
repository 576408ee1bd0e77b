"""LoRA adapters: always written as adapter files that plain PEFT loads, and read back from such files.

In the model the factors of experts are stored expert first (``sharding/expert_lora.py``); files have PEFT's layout.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from hf_fsdpturbo.checkpoint.commit import read_json
from hf_fsdpturbo.lora.adapter import file_tensors, trained_adapter
from hf_fsdpturbo.sharding.expert_lora import FACTORS, expert_factors, to_expert_first, to_peft
from hf_fsdpturbo.sharding.outer_fsdp import reshard
from hf_fsdpturbo.shards import copy_full_tensor_

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
SCALING_FIELDS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""Fields of an adapter's configuration that decide its strength: a file read under other values is another adapter."""


def is_peft(model: Any) -> bool:
    """Whether the model is PEFT's wrapper (told by its attribute: the package is optional)."""
    return getattr(model, "peft_config", None) is not None and hasattr(model, "get_base_model")


def is_adapter(model: Any) -> bool:
    """Whether a model is given as the folder of an adapter's files."""
    return isinstance(model, str) and os.path.isfile(os.path.join(model, ADAPTER_CONFIG))


def gather_adapter(model: nn.Module) -> dict[str, Tensor]:
    """Trainable tensors in PEFT's layout, whole, on the CPU of rank 0 (empty elsewhere); collective. Few bytes."""
    reshard(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = cast(dict[str, Tensor], get_model_state_dict(model, options=options))
    factors = expert_factors(model)
    return {name: to_peft(factors[name], t).contiguous() if name in factors else t for name, t in state.items()}


def from_shards(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint's shards as PEFT's file has them: no adapter's name, experts' factors as matrices.

    Args:
        tensors: whole, by their names in the PEFT model (``base_model.model...lora_A.default.weight``).
    """
    found = {}
    for name, tensor in tensors.items():
        parts, kind = name.split("."), None
        for place, part in enumerate(parts):
            if part.startswith("lora_") or part == "modules_to_save":
                kind = part
                del parts[place + 1]  # the adapter's name
                break
        if kind == "modules_to_save":
            parts.remove(kind)
        elif kind in FACTORS and tensor.ndim == 3:
            tensor = to_peft(kind, tensor)
        found[".".join(parts)] = tensor.contiguous()
    return found


def load_adapter(model: nn.Module, directory: str) -> None:
    """Copy an adapter file of the same adapter into the (sharded) model in place; every rank keeps its own slices.

    Raises:
        ValueError: the file is of another adapter: strength, names or shapes differ; names file and field.
    """
    from safetensors import safe_open

    reshard(model)
    adapter = trained_adapter(model)
    _check_strength(cast(Any, model).peft_config[adapter], os.path.join(directory, ADAPTER_CONFIG))
    trainable = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    targets = file_tensors(model, trainable)
    factors = {name.replace(f".{adapter}.", "."): factor for name, factor in expert_factors(model).items()}
    path = os.path.join(directory, ADAPTER_FILE)
    with safe_open(path, framework="pt") as file, torch.no_grad():
        if set(file.keys()) != set(targets):
            odd = sorted(set(file.keys()) ^ set(targets))
            raise ValueError(f"{path} is another adapter: {odd[:4]} are only in the file or only in the model.")
        for name, target in targets.items():
            whole = file.get_tensor(name)
            if name in factors:
                whole = to_expert_first(factors[name], whole, target.shape[0])
            if tuple(whole.shape) != tuple(target.shape):
                raise ValueError(f"{path}: {name} has shape {tuple(whole.shape)}, the model's {tuple(target.shape)}.")
            copy_full_tensor_(target, whole)


def _check_strength(config: Any, path: str) -> None:
    saved = read_json(path)
    for field in SCALING_FIELDS:
        mine, other = getattr(config, field), saved.get(field)
        if (mine or None) != (other or None):
            raise ValueError(
                f"{path}: {field} is {other!r}, but the model's adapter has {mine!r}. Use the same peft_config."
            )
