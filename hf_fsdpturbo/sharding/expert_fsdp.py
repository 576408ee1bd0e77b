"""EFSDP: the parameters of the local experts over (efsdp, expert_cp), gradients divided by dp * cp in every layout."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hf_fsdpturbo import compat
from hf_fsdpturbo.expert_stacks import transposed
from hf_fsdpturbo.sharding.expert_lora import FACTORS, base_module
from hf_fsdpturbo.sharding.expert_parallel import ModuleExperts, is_plain_swiglu, shared_by_experts
from hf_fsdpturbo.shards import local_tensor

# Note [Which dim experts are sharded on]
# Dim 0 (whole experts) when the shard group divides the local experts: nothing is cut inside a matrix. Otherwise the
# *input* dim of the stacked matrices: dim 2, or dim 1 in transposed layouts. Never the output dim of a concatenated
# gate_up_proj: loaders cut gate and up separately, and the rows would come back permuted without an error. Biases then
# go on their only other dim, unless they are such a concatenation. No shard may be uneven or empty: FSDP refuses
# uneven ones on dims other than 0, and Transformers' loader fails on empty ones with a bare IndexError. LoRA factors
# go on the features they share with the base: lora_A [L, r, I] on dim 2, lora_B [L, O, r] on dim 1.


def expert_shard_dim(
    parameter: nn.Parameter, num_local_experts: int, shard_size: int, on_dim_1: bool, local_rows: int | None = None
) -> int:
    """Dim on which FSDP shards an expert parameter ``[L, ...]``: see Note [Which dim experts are sharded on].

    ``local_rows`` are its rows on this ep rank, where they are not one an expert.
    """
    if num_local_experts % shard_size == 0 and (local_rows or num_local_experts) % shard_size == 0:
        return 0
    return 1 if on_dim_1 or parameter.ndim < 3 else 2


def check_expert_shards(module: nn.Module, name: str, num_local_experts: int, shard_size: int) -> None:
    """Every sharded dim must divide, and must be one that loaders do not cut.

    Raises:
        ValueError: naming the layer, the parameter, both numbers.
    """
    experts = base_module(module)
    concatenated = bool(getattr(experts, "is_concatenated", True))
    ep_size = max(1, getattr(experts, "num_experts", num_local_experts) // num_local_experts)
    shared = shared_by_experts(module)
    for parameter_name, parameter in module.named_parameters():
        if parameter in shared:
            continue
        on_dim_1 = _dim_1(parameter_name, transposed(experts))
        rows = parameter.shape[0] // ep_size if parameter.ndim else None
        dim = expert_shard_dim(parameter, num_local_experts, shard_size, on_dim_1, rows)
        if dim == 0:
            continue
        fused_bias = parameter.ndim < 3 and concatenated and "gate" in parameter_name
        if fused_bias or parameter.ndim < 2 or parameter.shape[dim] % shard_size:
            other = "" if fused_bias or parameter.ndim < 2 else f", or dim {dim} ({parameter.shape[dim]})"
            raise ValueError(
                f"efsdp_size * cp_size ({shard_size}) must divide the {num_local_experts} local experts of "
                f"{name}.{parameter_name}{other}. Choose another efsdp_size or ep_size."
            )


def _dim_1(parameter_name: str, is_transposed: bool) -> bool:
    """Whether a stacked matrix that is not cut by experts is cut on dim 1."""
    factor = next((part for part in parameter_name.split(".") if part in FACTORS), None)
    return is_transposed if factor is None else factor == "lora_B"


# Note [Experts that one rank holds whole]
# Where shard and replicate axis are one rank (ep == dp), FSDP has nothing to gather or reduce, but copies every weight
# twice and every gradient three times a step: 12 of 250 ms of an 8-layer step on two H200. There the module is wrapped
# without parameters, and the view that dispatchers read divides the gradients by the same factor. Leaving that out is
# B1 of the reference: parity tests and the start-up scale check see it. Plain SwiGLU experts that are stored in
# float32 and compute in bf16 are converted by that view too: once a step, or by our AdamW when it writes the weight.
# The copies (2 bytes an element of this rank's experts) stay between forward and backward, whatever
# reshard_after_forward says; so frozen experts, which would not be converted once a step but only cost the room, and
# any without gradients (a reference model) do without.


def one_rank_holds_whole(module: nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> bool:
    """Whether FSDP would only copy or convert: see Note [Experts that one rank holds whole]."""
    compute = options["mp_policy"].param_dtype
    stored = {parameter.dtype for parameter in module.parameters() if isinstance(parameter, DTensor)}
    trained = all(parameter.requires_grad for parameter in module.parameters())
    converted = trained and stored == {torch.float32} and compute == torch.bfloat16 and is_plain_swiglu(module)
    fits = compute is None or stored == {compute} or converted
    return mesh.size() == 1 and "offload_policy" not in options and fits


def frozen_bytes(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of quantised weights of an experts module."""
    return {parameter for parameter in module.parameters() if parameter.dtype == torch.uint8}


def fully_shard_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    num_local_experts: int,
    divide_factor: int,
    options: dict[str, Any],
    experts: ModuleExperts | None = None,
    shared: Collection[nn.Parameter] = (),
) -> None:
    """Wrap one experts module and divide its gradients, also when the shard group is one rank.

    Args:
        module: experts module whose parameters are DTensors on the ep axis of the same parent mesh.
        mesh: shard axis, with a replicate axis before it or none.
        num_local_experts: experts of this ep rank.
        divide_factor: ``dp_size * cp_size``; an expert's gradient already sums the tokens of its whole ep group.
        options: further arguments of ``fully_shard`` (policies, reshard_after_forward).
        experts: the view that can divide gradients where FSDP would only copy; without one FSDP always does.
        shared: parameters that all experts share, left out: they are whole on every rank. So are quantised weights
            that one rank holds whole: they are frozen, so there is nothing to gather or reduce.
    """
    if experts is not None and one_rank_holds_whole(module, mesh, options):
        fully_shard(module, mesh=mesh, ignored_params=set(module.parameters()), **options)
        experts.gradient_divisor = divide_factor
        compute = options["mp_policy"].param_dtype
        if compute is not None and experts.compute_dtype != compute:
            experts.compute_in = compute
        return
    shard_size = mesh.size(mesh.ndim - 1)
    swapped = transposed(base_module(module))
    on_dim_1 = {parameter: _dim_1(name, swapped) for name, parameter in module.named_parameters()}

    def placement(parameter: nn.Parameter) -> Shard:
        rows = local_tensor(parameter).shape[0]
        return Shard(expert_shard_dim(parameter, num_local_experts, shard_size, on_dim_1[parameter], rows))

    left_out = set(shared) | (frozen_bytes(module) if shard_size == 1 else set())
    fully_shard(module, mesh=mesh, shard_placement_fn=placement, ignored_params=left_out, **options)
    assert isinstance(module, FSDPModule)
    getattr(module, compat.gradient_divide_factor_method())(float(divide_factor))
    # Gloo and HCCL have no PREMUL_SUM, so: a plain sum, divided after. A group of one divides by itself; the forced
    # sum would divide a second time.
    if shard_size > 1 and compat.has_force_sum_reduction():
        module.set_force_sum_reduction_for_comms(True)
