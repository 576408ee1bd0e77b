"""LoRA and other PEFT adapters: always written as adapter files that plain PEFT loads."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from hf_fsdpturbo.checkpoint.boxes import local_box, local_tensor
from hf_fsdpturbo.checkpoint.hub import reshard

ADAPTER_FILE = "adapter_model.safetensors"


def is_peft(model: Any) -> bool:
    """Whether the model is PEFT's wrapper (told by its attribute: the package is optional)."""
    return getattr(model, "peft_config", None) is not None and hasattr(model, "get_base_model")


def gather_adapter(model: nn.Module) -> dict[str, Tensor]:
    """Trainable tensors, whole, on the CPU of rank 0 (empty elsewhere); collective. Adapters are small."""
    reshard(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    return get_model_state_dict(model, options=options)


def load_adapter(model: nn.Module, directory: str) -> None:
    """Copy an adapter file of the same adapter into the (sharded) model in place; every rank reads its own slices.

    Raises:
        ValueError: the file lacks a tensor or has one of another shape.
    """
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    reshard(model)
    trainable = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    targets: dict[str, Any] = get_peft_model_state_dict(model, state_dict=trainable)
    path = os.path.join(directory, ADAPTER_FILE)
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name, target in targets.items():
            if name not in file.keys():
                raise ValueError(f"{path} lacks {name}: it is another adapter.")
            rows = file.get_slice(name)
            if tuple(rows.get_shape()) != tuple(target.shape):
                raise ValueError(f"{path}: {name} has shape {rows.get_shape()}, the model's has {tuple(target.shape)}.")
            box, local = local_box(target), local_tensor(target)
            if local.numel():
                own = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
                local.copy_(rows[own])
