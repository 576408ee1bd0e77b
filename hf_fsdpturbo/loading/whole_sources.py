"""Conversions that slices would scramble: read what they need of their sources, convert, then keep this rank's part.

    Transformers' loader        renamed tensors, and joins that are proven on slices (conversions.py)
    here                        all others, one after the other: in memory is one of them beside the shards

Stacks of experts are done here too, on slices: Transformers' loader would walk, copy and slice every piece on every
rank, and here a rank sees those of its own experts. So is what is packed: theirs would hold several in float32.

Sources are read along the dims that the conversion leaves alone in slices, whole along the others, by some threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_fsdpturbo.loading.conversions import (
    Conversion,
    Region,
    Shape,
    free_dims,
    runs_on_slices,
    source_regions,
    stacked,
)
from hf_fsdpturbo.loading.kept_packed import kept_packed
from hf_fsdpturbo.loading.open_files import Slice, any_packed
from hf_fsdpturbo.loading.source_map import SourceMap, map_sources
from hf_fsdpturbo.shards import like, local_box, local_tensor

READERS = 4
"""Threads that read, as many as Transformers' loader has."""

Read = Callable[[str, tuple[slice, ...]], Tensor]
"""``read(key, index)``: a part of one source, in the dtype in which it is converted, on the CPU."""


@dataclass
class Target:
    """What is asked of one target: ``shape`` (whole) and dtype."""

    shape: Shape
    dtype: torch.dtype


@contextlib.contextmanager
def exact_conversions(
    device: torch.device,
    found: SourceMap,
    check: Callable[[nn.Module], None] = lambda model: None,
    packed_only: bool = False,
) -> Iterator[None]:
    """While open, ``from_pretrained`` fills sharded models with every rank's part of what a whole load gives.

    The function of Transformers that converts and loads is wrapped for the length of the context, in this process.

    Args:
        device: where shards live.
        found: filled with what is loaded from what.
        check: called with the model once ``found`` is filled, before anything is read.
        packed_only: checkpoints without packed tensors are left to Transformers.
    """
    from transformers import core_model_loading, modeling_utils

    own = modeling_utils.convert_and_load_state_dict_in_model
    as_shard = core_model_loading._dtensor_from_local_like

    def load(model: Any, state_dict: dict[str, Any], load_config: Any, disk_offload_index: Any = None) -> Any:
        if load_config.hf_quantizer is not None or (packed_only and not any_packed(state_dict, state_dict)):
            return own(model, state_dict, load_config, disk_offload_index)
        map_sources(found, model, state_dict, load_config)
        check(model)
        known = found.conversions.values()
        apart = [c for c in known if any_packed(state_dict, c.keys) or not _left_to_transformers(model, found, c)]
        taken = {key for conversion in apart for key in conversion.keys}
        rest = {key: source for key, source in state_dict.items() if key not in taken}
        info, index = own(model, rest, load_config, disk_offload_index)
        with ThreadPoolExecutor(READERS, "read weights") as pool:
            for conversion in apart:
                if kept_packed(model, conversion, state_dict, device, info):
                    continue
                read = reader(state_dict, found.dtypes[conversion.name], device if stacked(conversion) else None)
                load_apart(model, conversion, found.sources_of(conversion), read, device, info, pool)
        return info, index

    modeling_utils.convert_and_load_state_dict_in_model = load
    if device.type == "cpu":  # theirs moves what stays on the host to the mesh's device
        core_model_loading._dtensor_from_local_like = lambda local, reference: like(reference, local.contiguous())
    try:
        yield
    finally:
        modeling_utils.convert_and_load_state_dict_in_model = own
        core_model_loading._dtensor_from_local_like = as_shard


def reader(sources: Mapping[str, Any], dtype: torch.dtype, device: torch.device | None = None) -> Read:
    """Reads from tensors or safetensors slices; to the CPU, or to a device."""

    def read(key: str, index: tuple[slice, ...]) -> Tensor:
        source = sources[key]
        part = source.read(index, dtype) if isinstance(source, Slice) else source[index if index else ...]
        return cast(Tensor, part).to(device=device, dtype=dtype)

    return read


def targets_of(model: nn.Module, conversion: Conversion) -> dict[str, Tensor]:
    """The parameters and buffers of one conversion that the model has."""
    found = {name: _get(model, name) for name in conversion.targets}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _get(model: nn.Module, name: str) -> Tensor | None:
    path, _, last = name.rpartition(".")
    try:
        return cast("Tensor | None", getattr(model.get_submodule(path), last, None))
    except AttributeError:
        return None


def shapes(targets: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Whole shapes by name."""
    return {name: tuple(tensor.shape) for name, tensor in targets.items()}


def _left_to_transformers(model: nn.Module, found: SourceMap, conversion: Conversion) -> bool:
    """Whether Transformers' loader gives this rank's part exactly: nothing is sharded, or the allow-list has it."""
    if conversion.converter is None:
        return True
    if stacked(conversion):
        return False  # see the top of this file
    targets = targets_of(model, conversion)
    sharded = {name: sharded_dims(tensor) for name, tensor in targets.items()}
    if not any(sharded.values()):
        return True
    if len(targets) < len(conversion.targets) or not _placed_alike(list(targets.values())):
        return False
    if any(not local_tensor(tensor).numel() for tensor in targets.values()):
        return False  # a stack of no pieces
    free = free_dims(conversion, found.sources_of(conversion), shapes(targets))
    first = targets[conversion.name]
    return runs_on_slices(conversion, free, sharded[conversion.name], first.ndim)


def sharded_dims(tensor: Tensor) -> frozenset[int]:
    """Dims that more than one rank shares."""
    if not isinstance(tensor, DTensor):
        return frozenset()
    axes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    cut = [cast(Any, place) for place, size in axes if size > 1 and not place.is_replicate()]
    return frozenset(place.dim % tensor.ndim for place in cut)


def _placed_alike(tensors: list[Tensor]) -> bool:
    """Whether all targets are DTensors on one mesh with the same placements."""
    places = [(t.device_mesh, t.placements) for t in tensors if isinstance(t, DTensor)]
    return len(places) == len(tensors) and all(place == places[0] for place in places)


def load_apart(
    model: nn.Module,
    conversion: Conversion,
    sources: Mapping[str, Shape],
    read: Read,
    device: torch.device,
    info: Any,
    pool: ThreadPoolExecutor | None = None,
) -> None:
    """Convert one group of sources and set this rank's part of every target, as Transformers' loader sets it.

    Args:
        info: Transformers' ``LoadStateDictInfo``; what does not fit goes there.
        pool: threads that read; without, each source is read when it is needed.

    Raises:
        ValueError: the conversion fails; names tensor, conversion, sources.
    """
    from transformers.core_model_loading import set_param_for_module

    targets = targets_of(model, conversion)
    region = _own_region(conversion, sources, targets)
    wanted = {name: Target(tuple(tensor.shape), tensor.dtype) for name, tensor in targets.items()}
    for name, part in convert(model, conversion, sources, wanted, read, region, pool).items():
        if name not in targets:
            info.unexpected_keys.add(name)
            continue
        expected = region_shape(wanted[name].shape, region)
        if tuple(part.shape) != expected:
            info.missing_keys.discard(name)
            info.mismatched_keys.add((name, part.shape, torch.Size(expected)))
            continue
        own = part[_index_in(region, targets[name])].to(device=device, dtype=targets[name].dtype)
        if own.untyped_storage().nbytes() > own.numel() * own.element_size():
            own = own.clone()  # a view would keep the whole
        set_param_for_module(cast(Any, model), name, own.contiguous(), info, cast(Any, None))


def _own_region(conversion: Conversion, sources: Mapping[str, Shape], targets: Mapping[str, Tensor]) -> Region:
    """This rank's rows along the free dims that are sharded alike in all targets."""
    if not targets:
        return {}
    free = free_dims(conversion, sources, shapes(targets)) if len(targets) == len(conversion.targets) else frozenset()
    boxes = [local_box(tensor) for tensor in targets.values()]
    first = next(iter(targets.values()))
    region = {}
    for dim in free:
        rows = {(box.offset[dim], box.offset[dim] + box.shape[dim]) for box in boxes}
        if len(rows) == 1 and rows != {(0, first.shape[dim])}:
            region[dim] = rows.pop()
    return region


def _index_in(region: Region, target: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a target lies in its region."""
    box = local_box(target)
    return tuple(slice(None) if dim in region else own for dim, own in enumerate(box.slices))


def region_shape(shape: Shape, region: Region) -> Shape:
    """Shape of a region of a tensor."""
    return tuple(region[dim][1] - region[dim][0] if dim in region else size for dim, size in enumerate(shape))


class _Shown:
    """A model as operations see it: parameters have the shape of the region that is made (on meta)."""

    def __init__(self, model: nn.Module, shown: dict[str, Tensor]) -> None:
        self._model, self._shown = model, shown

    def get_parameter(self, name: str) -> Tensor:
        return self._shown[name] if name in self._shown else self._model.get_parameter(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def convert(
    model: nn.Module,
    conversion: Conversion,
    sources: Mapping[str, Shape],
    targets: Mapping[str, Target],
    read: Read,
    region: Region,
    pool: ThreadPoolExecutor | None = None,
) -> dict[str, Tensor]:
    """A region of all targets by Transformers' own operations.

    Args:
        sources: shape of every source.
        targets: shape and dtype of every target.
        read: reads a part of a source.
        region: along free dims only; empty for whole targets.
        pool: threads that read; without, each source is read when it is needed.

    Raises:
        ValueError: an operation fails; names tensor, conversion, sources.
    """
    if any(start == stop for start, stop in region.values()):
        return {name: _empty(to, region, "cpu") for name, to in targets.items()}
    ndim = len(next(iter(targets.values())).shape) if targets else 0
    parts = source_regions(conversion, sources, ndim, region)
    converter: Any = deepcopy(conversion.converter)
    for pattern, keys in conversion.sources.items():
        for key in keys:
            if key in parts:
                index = tuple(slice(*parts[key].get(dim, (0, size))) for dim, size in enumerate(sources[key]))
                if converter is None:
                    return {conversion.name: read(key, index)}
                later = partial(read, key, index) if pool is None else pool.submit(read, key, index)
                converter.add_tensor(conversion.name, key, pattern, later)
    shown = {name: _empty(to, region, "meta") for name, to in targets.items()}
    try:
        made = converter.convert(conversion.name, model=_Shown(model, shown), config=model.config)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(_failed(conversion, error)) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _empty(target: Target, region: Region, device: str) -> Tensor:
    return torch.empty(region_shape(target.shape, region), dtype=target.dtype, device=device)


def _failed(conversion: Conversion, error: BaseException) -> str:
    absent = [pattern for pattern in conversion.converter.source_patterns if pattern not in conversion.sources]
    lacking = f" The checkpoint has no source for {absent}." if absent else ""
    keys = f"{conversion.keys[:4]}{' and more' if len(conversion.keys) > 4 else ''}"
    return (
        f"{conversion.name}: {conversion.words} of {keys} "
        f"failed ({type(error).__name__}: {error}).{lacking} Copy the whole checkpoint, or use the model's own."
    )
