"""Export of a model with its adapter merged: the Hub checkpoint that ``merge_and_unload`` would give, from shards."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from hf_fsdpturbo.checkpoint.commit import wait_visible
from hf_fsdpturbo.checkpoint.hub import export_tensors, saved_tensors
from hf_fsdpturbo.checkpoint.rank_tensors import RankTensors
from hf_fsdpturbo.lora.adapter import hide, layers_inside, trained_adapter, wrappers
from hf_fsdpturbo.quantised.packed_weight import is_statistic, packed_weight
from hf_fsdpturbo.ranks import rank, together
from hf_fsdpturbo.sharding.expert_lora import FACTORS, is_param_wrapper, merged_weight, to_expert_first
from hf_fsdpturbo.sharding.outer_fsdp import reshard
from hf_fsdpturbo.shards import like, local_box, local_tensor, whole_tensor


def export_merged(peft_model: Any, directory: str, max_file_bytes: int, tokenizer: Any = None) -> list[str]:
    """Write base weights plus ``s B A`` under the names of the base checkpoint; collective. The model stays as it is.

    Beside the model, each rank holds one more copy of its shards of the adapted weights; of a quantised model, of all
    its shards in full, on the host: the base is then the dequantised one.

    Raises:
        CheckpointError: on every rank, if a rank could not write.
    """
    base = peft_model.get_base_model()
    adapter = trained_adapter(peft_model)
    reshard(base)
    found = wrappers(base)
    show = hide(base)
    try:
        with together(f"saving to {directory}"):
            if rank() == 0:
                os.makedirs(directory, exist_ok=True)
                base.save_pretrained(directory, state_dict={})  # config and generation config
                if tokenizer is not None:
                    tokenizer.save_pretrained(directory)
        with together(f"saving to {directory}"):
            wait_visible(directory)
        tensors = in_full(base, saved_tensors(base))
        for name, wrapper in found:
            for layer in layers_inside(wrapper):
                target = f"{name}.{layer.parameter_name if is_param_wrapper(layer) else 'weight'}"
                tensors[target] = _merged(tensors[target], layer, adapter)
            if hasattr(wrapper, "modules_to_save"):
                for inner, parameter in wrapper.modules_to_save[adapter].named_parameters():
                    tensors[f"{name}.{inner}"] = parameter.detach()
        return export_tensors(base, RankTensors(tensors), directory, max_file_bytes)
    finally:
        show()


def in_full(base: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A sharded model's tensors by name, quantised ones as they would be in full, on the host."""
    found = {}
    for name, tensor in tensors.items():
        weight = packed_weight(base, name)
        if weight is not None:
            found[name] = weight.in_full(tensor, weight.values().cpu())
        elif not is_statistic(name):
            found[name] = tensor
    return found


def _merged(weight: Tensor, layer: Any, adapter: str) -> Tensor:
    """``weight`` plus the layer's adapter, sharded like it; both factors are gathered for the length of the call."""
    a, b = (whole_tensor(getattr(layer, factor)[adapter].weight.detach()) for factor in FACTORS)
    if is_param_wrapper(layer) and a.ndim == 2:  # in one process they are as PEFT has them
        a, b = (to_expert_first(factor, f, weight.shape[0]) for factor, f in zip(FACTORS, (a, b), strict=True))
    part, local = local_box(weight).slices, local_tensor(weight.detach())
    if a.ndim == 3:
        merged = merged_weight(local, layer, adapter, a, b, part)
    else:
        delta = (b[part[0]].float() @ a[:, part[1]].float()) * layer.scaling[adapter]
        merged = (local.float() + delta).to(local.dtype)
    return like(weight, merged)
