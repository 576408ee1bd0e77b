"""After a load by path: what every rank holds, compared bit for bit with a conversion of the files on disk.

``sample`` compares a few rows of every tensor; it converts parts of the sources along the dims that the conversion is
said to leave alone, and proves that first, on numbered elements. ``full`` converts whole sources and compares all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_fsdpturbo.loading.conversions import Conversion, Region, Shape, free_dims, joined_dim, stacked
from hf_fsdpturbo.loading.open_files import OpenFiles
from hf_fsdpturbo.loading.source_map import SourceMap
from hf_fsdpturbo.loading.whole_sources import Target, convert, reader, region_shape, shapes, targets_of
from hf_fsdpturbo.quantised.packed_weight import PackedWeight, packed_weight
from hf_fsdpturbo.shards import Box, local_box, local_tensor

FEW = 64
"""Elements of a row that are compared."""
MANY = 2**20
"""Elements of a sample (a conversion touches whole dims) of which one is enough."""
PROVEN_SIZE = 3
"""Size of a dim on which a conversion is shown to leave elements alone."""


def check_loaded(model: nn.Module, found: SourceMap, sources: OpenFiles, mode: str) -> None:
    """Compare this rank's part of every loaded tensor with the files; nothing is communicated.

    Args:
        model: loaded, sharded or not.
        found: which source went where.
        sources: the checkpoint's tensors; none (another format): nothing is compared.
        mode: ``sample``, ``full`` or ``off``.

    Raises:
        ValueError: a tensor differs; names tensor, conversion, file.
    """
    if mode == "off" or not sources:
        return
    proven: set[Any] = set()
    for conversion in found.conversions.values():
        _check_conversion(model, conversion, found, sources, mode, proven)


def _check_conversion(
    model: nn.Module, conversion: Conversion, found: SourceMap, sources: OpenFiles, mode: str, proven: set[Any]
) -> None:
    targets = targets_of(model, conversion)
    if not targets:
        return
    packed = {name: weight for name in targets if (weight := packed_weight(model, name)) is not None}
    targets |= {name: weight.shown() for name, weight in packed.items()}
    read, known = reader(sources, found.dtypes[conversion.name]), found.sources_of(conversion)
    wanted = {name: Target(tuple(tensor.shape), tensor.dtype) for name, tensor in targets.items()}
    boxes = {name: local_box(tensor) for name, tensor in targets.items()}
    regions: list[Region] = [{}]
    if mode == "sample" and len(targets) == len(conversion.targets):
        free = free_dims(conversion, known, shapes(targets))
        if not leaves_alone(model, conversion, known, wanted, free, proven):
            raise ValueError(
                f"{conversion.name}: {conversion.words} does not leave dims {sorted(free)} alone, as hf_fsdpturbo's "
                f"list of conversions says, for {sources.path(conversion.keys[0])}. {_FIX}"
            )
        regions = sample_regions(free, list(boxes.values()))
    for region in regions:
        made = convert(model, conversion, known, wanted, read, region)
        for name in targets:
            if not _same(packed.get(name, targets[name]), targets[name], boxes[name], made[name], region):
                raise ValueError(
                    f"{name} is not what {conversion.words} makes of {conversion.keys[0]} in "
                    f"{sources.path(conversion.keys[0])} (compared at {region or 'all'}). {_FIX}"
                )


_FIX = (
    "Training would start from wrong weights: load with init_config {name: init_on_rank0}, which reads whole tensors, "
    "and report this with the version of Transformers."
)


def _same(held: Tensor | PackedWeight, target: Tensor, box: Box, made: Tensor, region: Region) -> bool:
    """Whether this rank's part of a target has the bits of a region of the whole, as far as it goes.

    Of a quantised one ``held``: whether it is as near as it can be.
    """
    theirs = tuple(slice(None) if dim in region else own for dim, own in enumerate(box.slices))
    ours = tuple(
        slice(region[dim][0] - start, region[dim][1] - start) if dim in region else slice(None)
        for dim, start in enumerate(box.offset)
    )
    expected = made[theirs].to(target.dtype).contiguous()
    if isinstance(held, PackedWeight):
        return held.is_near(expected, ours)
    found = local_tensor(target).detach()[ours].cpu().contiguous()
    if expected.shape != found.shape:
        return False
    return torch.equal(expected.reshape(-1).view(torch.uint8), found.reshape(-1).view(torch.uint8))


def sample_regions(free: frozenset[int], boxes: list[Box]) -> list[Region]:
    """First, middle and last rows of this rank along the free dims, a few elements of the last dim.

    Only the first of them where the other dims make them large. Dims along which the targets are placed differently
    stay whole. Without an element there is nothing to compare.
    """
    if not boxes or any(0 in box.shape for box in boxes):
        return []
    first, alike = boxes[0], []
    for dim in sorted(free):
        if len({(box.offset[dim], box.shape[dim]) for box in boxes}) == 1:
            alike.append(dim)
    regions: list[Region] = []
    for part in (0.0, 0.5, 1.0):
        region: Region = {}
        for dim in alike:
            size = min(first.shape[dim], FEW if dim == len(first.shape) - 1 else 1)
            start = first.offset[dim] + int(part * (first.shape[dim] - size))
            region[dim] = (start, start + size)
        if region not in regions:
            regions.append(region)
    return regions[:1] if _count(region_shape(first.shape, regions[0])) > MANY else regions


def leaves_alone(
    model: nn.Module,
    conversion: Conversion,
    sources: Mapping[str, Shape],
    targets: Mapping[str, Target],
    free: frozenset[int],
    proven: set[Any],
) -> bool:
    """Whether parts along the free dims give the parts of the whole: tried on numbered elements, small along them.

    Args:
        proven: what was tried before (layers repeat).
    """
    if conversion.converter is None or not free:
        return True
    rule = (tuple(conversion.converter.source_patterns), tuple(conversion.converter.target_patterns))
    small, known, wanted = _small(conversion, sources, targets, free)
    tried = (rule, free, tuple(known.values()), tuple(target.shape for target in wanted.values()))
    if tried in proven:
        return True
    numbered, start = {}, 1
    for key, shape in known.items():
        numbered[key] = torch.arange(start, start + _count(shape), dtype=torch.int32).reshape(shape)
        start += numbered[key].numel()
    if not _parts_of_whole(model, small, known, wanted, numbered, free):
        return False
    proven.add(tried)
    return True


def _parts_of_whole(
    model: nn.Module,
    conversion: Conversion,
    sources: Mapping[str, Shape],
    targets: Mapping[str, Target],
    numbered: Mapping[str, Tensor],
    free: frozenset[int],
) -> bool:
    """Whether rows (first, middle, last) along each free dim, converted alone, are those of the whole."""
    read = reader(numbered, torch.int32)
    try:
        whole = convert(model, conversion, sources, targets, read, {})
        for dim in free:
            size = next(iter(targets.values())).shape[dim]
            for row in sorted({0, size // 2, size - 1}):
                parts = convert(model, conversion, sources, targets, read, {dim: (row, row + 1)})
                if not all(torch.equal(part, whole[name].narrow(dim, row, 1)) for name, part in parts.items()):
                    return False
    except ValueError:
        return False
    return True


def _count(shape: Shape) -> int:
    return int(torch.Size(shape).numel())


def _small(
    conversion: Conversion, sources: Mapping[str, Shape], targets: Mapping[str, Target], free: frozenset[int]
) -> tuple[Conversion, dict[str, Shape], dict[str, Target]]:
    """The same conversion of sources that are small along the free dims, whole along the others."""
    ndim = len(next(iter(targets.values())).shape)
    joined, first_dim = joined_dim(conversion, ndim), 1 if stacked(conversion) else 0
    small = Conversion(conversion.name, conversion.targets, conversion.converter)
    known: dict[str, Shape] = {}
    total = 0
    for pattern, keys in conversion.sources.items():
        pieces = len(keys) // len(targets)
        every = not (first_dim and 0 in free)
        kept = [key for number, key in enumerate(keys) if every or number % pieces < PROVEN_SIZE]
        small.sources[pattern] = kept
        for key in kept:
            shape = sources[key]
            known[key] = tuple(
                min(size, PROVEN_SIZE) if dim + first_dim in free else size for dim, size in enumerate(shape)
            )
        if joined is not None:
            sizes = [known[key][joined - first_dim] for key in kept]
            total += sizes[0] if first_dim else sum(sizes)
    wanted = {}
    for name, target in targets.items():
        shape = tuple(min(size, PROVEN_SIZE) if dim in free else size for dim, size in enumerate(target.shape))
        if joined is not None and joined in free:
            shape = tuple(total if dim == joined else size for dim, size in enumerate(shape))
        wanted[name] = Target(shape, torch.int32)
    return small, known, wanted
