"""EFSDP: the parameters of the local experts over (efsdp, expert_cp), gradients divided by dp * cp in every layout."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from hf_fsdpturbo import compat

# Note [Which dim experts are sharded on]
# Dim 0 (whole experts) when the shard group divides the local experts: nothing is cut inside a matrix. Otherwise the
# *input* dim of the stacked matrices: dim 2, or dim 1 in transposed layouts. Never the output dim: gate_up_proj is a
# concatenation of gate and up, loaders cut the two separately, and the rows would come back permuted without an error.
# Vectors (biases) stay on dim 0, where FSDP allows uneven and empty shards; other dims have to divide.


def expert_shard_dim(parameter: nn.Parameter, num_local_experts: int, shard_size: int, transposed: bool) -> int:
    """Dim on which FSDP shards an expert parameter ``[L, ...]``: see Note [Which dim experts are sharded on]."""
    if num_local_experts % shard_size == 0 or parameter.ndim < 3:
        return 0
    return 1 if transposed else 2


def check_expert_shards(module: nn.Module, name: str, num_local_experts: int, shard_size: int) -> None:
    """Every sharded dim must divide.

    Raises:
        ValueError: naming the layer, the parameter, both numbers.
    """
    transposed = bool(getattr(module, "is_transposed", False))
    for parameter_name, parameter in module.named_parameters():
        dim = expert_shard_dim(parameter, num_local_experts, shard_size, transposed)
        if dim and parameter.shape[dim] % shard_size:
            raise ValueError(
                f"efsdp_size * cp_size ({shard_size}) must divide the local experts ({num_local_experts}) or dim "
                f"{dim} of {name}.{parameter_name} ({parameter.shape[dim]}). Choose another efsdp_size."
            )


def fully_shard_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    num_local_experts: int,
    divide_factor: int,
    options: dict[str, Any],
) -> None:
    """Wrap one experts module, also when the shard group is one rank: only FSDP applies the divide factor.

    Args:
        module: experts module whose parameters are DTensors on the ep axis of the same parent mesh.
        mesh: shard axis, with a replicate axis before it or none.
        num_local_experts: experts of this ep rank.
        divide_factor: ``dp_size * cp_size``; an expert's gradient already sums the tokens of its whole ep group.
        options: further arguments of ``fully_shard`` (policies, reshard_after_forward).
    """
    shard_size = mesh.size(mesh.ndim - 1)
    transposed = bool(getattr(module, "is_transposed", False))

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(expert_shard_dim(parameter, num_local_experts, shard_size, transposed))

    fully_shard(module, mesh=mesh, shard_placement_fn=placement, **options)
    assert isinstance(module, FSDPModule)
    getattr(module, compat.gradient_divide_factor_method())(float(divide_factor))
    # Gloo and HCCL have no PREMUL_SUM, so: a plain sum, divided after. A group of one divides by itself; the forced
    # sum would divide a second time.
    if shard_size > 1 and compat.has_force_sum_reduction():
        module.set_force_sum_reduction_for_comms(True)
