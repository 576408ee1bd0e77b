"""What this rank holds of a tensor: its box, its local part, and copies between whole tensors and shards.

A *box* is what a rank holds of a tensor: an offset and a shape in the whole tensor, as DTensor itself computes them.
Cutting mesh axis by mesh axis is wrong where two axes share a dim (ep ``Shard(0)`` with efsdp ``Shard(0)``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True, order=True)
class Box:
    """Offset and shape of one rank's part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indices of the part in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """What this box has of rows ``[start, stop)``, indices of dim 0 of the whole; empty when start >= stop."""
        return max(start, self.offset[0]), min(stop, self.offset[0] + self.shape[0])


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part as a plain tensor that shares memory with it; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; collective over its mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_box(tensor: Tensor) -> Box:
    """This rank's box, as DTensor itself computes it; a plain tensor is whole.

    Raises:
        ValueError: what the rank holds has another shape (a layout that DTensor cannot describe).
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(tensor.to_local().shape):
        found = tuple(tensor.to_local().shape)
        raise ValueError(f"A shard of shape {found} should have {tuple(shape)}: {tensor.placements}.")
    return Box(tuple(offset), tuple(shape))


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """``local`` as this rank's part of a tensor that is sharded like ``tensor``; itself where that is plain.

    It stays where it lies: on the host beside a mesh of an accelerator, as offloaded parameters do.
    """
    if not isinstance(tensor, DTensor):
        return local
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    if local.device.type in (mesh.device_type, "meta"):
        return DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
    # ``from_local`` would move it to the mesh's device; a meta tensor it leaves alone.
    described = DTensor.from_local(
        local.to("meta"), mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )
    made = torch.empty_like(described, device=local.device)
    local_tensor(made).copy_(local)
    return made


def copy_full_tensor_(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into a parameter: this rank's part of it, converted to its dtype, moved to its device.

    Raises:
        ValueError: the global shapes differ.
    """
    if tuple(target.shape) != tuple(full.shape):
        raise ValueError(f"A tensor of shape {tuple(full.shape)} does not fit a parameter of {tuple(target.shape)}.")
    local = local_tensor(target)
    if local.numel():
        with torch.no_grad():
            local.copy_(full[local_box(target).slices])


def materialize(model: nn.Module, device: torch.device) -> None:
    """Memory (any values) for parameters and persistent buffers that are on meta, sharded as they are; ties stay.

    They are marked as initialised: Transformers must not draw them again.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    local = torch.empty(local_tensor(parameter).shape, dtype=parameter.dtype, device=device)
                    made[parameter] = nn.Parameter(like(parameter, local), requires_grad=parameter.requires_grad)
                    made[parameter]._is_hf_initialized = True  # type: ignore[attr-defined]
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                module._buffers[name]._is_hf_initialized = True  # type: ignore[union-attr]


def own_storage(model: nn.Module) -> None:
    """Copy local shards that are views of a whole tensor (so the CPU loader leaves them), to let the whole go."""
    owned_by: dict[nn.Parameter, nn.Parameter] = {}  # tied weights are one parameter and stay one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            if parameter in owned_by:
                module._parameters[name] = owned_by[parameter]
                continue
            local = parameter.to_local()
            if local.device.type == "meta" or local.untyped_storage().nbytes() <= local.numel() * local.element_size():
                continue
            owned = nn.Parameter(like(parameter, local.detach().clone()), requires_grad=parameter.requires_grad)
            owned_by[parameter] = module._parameters[name] = owned


def transport_device(tensor: Tensor) -> torch.device:
    """Where a tensor must lie to be sent over the default group: its own device if the group has a backend for it."""
    config = str(dist.get_backend_config(dist.group.WORLD))
    if f"{tensor.device.type}:" in config or ":" not in config:
        return tensor.device
    accelerator = torch.accelerator.current_accelerator()
    return tensor.device if accelerator is None else accelerator
