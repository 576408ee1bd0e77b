"""Gradient norm and clipping over several meshes: each logical element counts once, one coefficient for all.

Parameters are grouped by what their gradient is sharded on. A group's local p-sum is reduced over its sharded axes
only; a replicated axis holds the same elements again and must not be added.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_fsdpturbo.ops.table import OPS, OpSet, get_ops
from hf_fsdpturbo.shards import local_tensor


@dataclass(frozen=True)
class ParameterGroup:
    """Trainable parameters whose gradients are reduced alike. ``mesh`` None: plain tensors, the same on every rank."""

    mesh: DeviceMesh | None
    sharded_axes: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def name(self) -> str:
        """``expert`` for parameters on an ep axis, ``dense`` for other meshes, ``replicated`` for plain tensors."""
        if self.mesh is None:
            return "replicated"
        return "expert" if "ep" in (self.mesh.mesh_dim_names or ()) else "dense"


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """Group trainable parameters by mesh and sharded axes, in model order: the same groups on every rank.

    Raises:
        RuntimeError: a parameter is a pending partial sum, which has no norm.
    """
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, DTensor):
            if any(placement.is_partial() for placement in parameter.placements):
                raise RuntimeError(f"{name} has placements {parameter.placements}: a partial sum has no norm.")
            axes = tuple(axis for axis, p in enumerate(parameter.placements) if not p.is_replicate())
            groups.setdefault((parameter.device_mesh, axes), []).append(parameter)
        else:
            groups.setdefault((None, ()), []).append(parameter)
    return [ParameterGroup(mesh, axes, tuple(members)) for (mesh, axes), members in groups.items()]


@torch.no_grad()
def _local_gradients(group: ParameterGroup) -> list[Tensor]:
    gradients = [p.grad for p in group.parameters if p.grad is not None]
    return [local_tensor(gradient) for gradient in gradients]


def _local_power_sum(gradients: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """``sum |g|^p`` in float32 (the maximum for p = inf) over local elements; float32 scalar."""
    gradients = [g for g in gradients if g.numel()]
    if not gradients:
        return torch.zeros((), device=device)
    if norm_type == 2:
        parts = (_ops(each).square_sum(members) for each, members in _by_device(gradients).items())
        return torch.stack([part.to(device) for part in parts]).sum()
    norms = torch._foreach_norm(gradients, norm_type, dtype=torch.float32)
    stacked = torch.stack([n.to(device) for n in norms])
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()


def _by_device(gradients: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Some may be offloaded beside others that are not."""
    found: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault(gradient.device, []).append(gradient)
    return found


def _ops(device: torch.device) -> OpSet:
    return get_ops(device.type if device.type in OPS else "cpu")


def _reduce(value: Tensor, group: ParameterGroup, norm_type: float) -> Tensor:
    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for axis in group.sharded_axes:
        assert group.mesh is not None
        if group.mesh.size(axis) > 1:
            dist.all_reduce(value, op=operation, group=group.mesh.get_group(axis))
    return value


def _check_norm_type(norm_type: float) -> float:
    norm_type = float(norm_type)
    if norm_type not in (1.0, 2.0, math.inf):
        raise ValueError(f"norm_type must be 1, 2 or inf, but it is {norm_type}.")
    return norm_type


def _device(groups: list[ParameterGroup]) -> torch.device:
    meshes = [group.mesh for group in groups if group.mesh is not None]
    if meshes:
        kind = meshes[0].device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    return groups[0].parameters[0].device if groups else torch.device("cpu")


def _norms(groups: list[ParameterGroup], gradients: list[list[Tensor]], norm_type: float) -> dict[str, Tensor]:
    device = _device(groups)
    powers: dict[str, list[Tensor]] = {}
    for group, local in zip(groups, gradients, strict=True):
        power = _reduce(_local_power_sum(local, norm_type, device), group, norm_type)
        powers.setdefault(group.name, []).append(power)
    norms = {name: _root(values, norm_type) for name, values in powers.items()}
    total = _root([n if math.isinf(norm_type) else n**norm_type for n in norms.values()], norm_type) if norms else None
    return {**norms, "total": torch.zeros(()) if total is None else total}


def _root(powers: list[Tensor], norm_type: float) -> Tensor:
    stacked = torch.stack(powers)
    return stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)


def measure_groups(
    groups: list[ParameterGroup], max_norm: float, norm_type: float = 2.0
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Norms of :func:`clip_groups_`, and the factor that clips to ``max_norm``, which is not applied.

    The factor is a float32 scalar on the mesh's device, at most 1; None where ``max_norm`` is inf. Collective.
    """
    norms = _norms(groups, [_local_gradients(group) for group in groups], _check_norm_type(norm_type))
    return norms, None if math.isinf(max_norm) else torch.clamp(max_norm / (norms["total"] + 1e-6), max=1.0)


def clip_groups_(groups: list[ParameterGroup], max_norm: float, norm_type: float = 2.0) -> dict[str, Tensor]:
    """:func:`clip_grad_norm_` on groups made once. Collective over all ranks.

    Returns:
        Global norm, before clipping, of the gradients of each kind of parameter (``dense``, ``expert``,
        ``replicated``) and in ``total``: float32 scalars, equal on all ranks. A gradient that is None counts as zero.
    """
    norms, factor = measure_groups(groups, max_norm, norm_type)
    if factor is not None:
        gradients = itertools.chain.from_iterable(_local_gradients(group) for group in groups)
        for device, members in _by_device(gradients).items():
            _ops(device).scale_(members, factor.to(device))
    return norms


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients by ``min(max_norm / (norm + 1e-6), 1)`` and return the global norm before that.

    Args:
        model: sharded or plain; parameters may live on several meshes.
        max_norm: inf only measures.
        norm_type: 1, 2 or inf.

    Returns:
        Global norm, float32 scalar on the mesh's device, equal on all ranks.

    Raises:
        ValueError: another norm_type.
    """
    return clip_groups_(parameter_groups(model), max_norm, norm_type)["total"]


def warm_up(model: nn.Module, norm_type: float = 2.0) -> None:
    """Run the norm's reductions once on zeros, so that every communicator exists before step 1."""
    groups = parameter_groups(model)
    device = _device(groups)
    for group in groups:
        _reduce(torch.zeros((), device=device), group, _check_norm_type(norm_type))


# Note [A parameter that no rank used]
# Its gradient must stay None, as in one process: AdamW decays a weight whose gradient is zero, and leaves one alone
# whose gradient is None. Whether another rank used it travels in the same all-reduce, a flag a parameter. Only a rank
# that lacks a gradient reads the flags, which on an accelerator waits for the collective once a step; a rank that has
# them all knows without reading, and that is every rank of most models. Any way to do without the wait decides by
# what was used in an earlier step, which is wrong in the step in which that changes.


def average_replicated_gradients_(groups: list[ParameterGroup]) -> None:
    """Average the gradients of plain (nowhere sharded) trainable parameters over all ranks.

    None counts as zero, and stays None where it is None on all ranks. Call it once a step, before the norm. Averaging
    an accumulated gradient again is harmless: the average of what is already equal on all ranks is itself.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    by_device: dict[torch.device, list[nn.Parameter]] = {}
    for group in groups:
        for parameter in group.parameters if group.mesh is None else ():
            by_device.setdefault(parameter.device, []).append(parameter)
    for device, parameters in by_device.items():
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        have = [p.grad is not None for p in parameters]
        flags = torch.tensor(have, dtype=torch.float32, device=device)
        together = torch.cat([*(g.float().flatten() for g in gradients), flags])  # one collective for all of it
        dist.all_reduce(together)  # HCCL and gloo differ in AVG: a sum in float32, divided after
        *sums, flags = together.split([*(g.numel() for g in gradients), len(parameters)])
        used = have if all(have) else flags.tolist()  # see Note [A parameter that no rank used]
        for parameter, summed, someone in zip(parameters, sums, used, strict=True):
            if someone:
                average = summed / dist.get_world_size()
                parameter.grad = average.view(parameter.shape).to(parameter.dtype)
