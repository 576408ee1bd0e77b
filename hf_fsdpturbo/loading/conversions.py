"""What a weight conversion of Transformers may do on a part of its sources: an allow-list, by operation and dim.

A checkpoint's tensors (*sources*) become parameters (*targets*) by a chain of operations: stack experts, join gate and
up, transpose, split. On a slice along a dim that no operation of the chain touches, the chain gives that slice of the
target. Along a dim that it touches, rows come out scrambled, without an error. What is not listed here is read whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Region = dict[int, tuple[int, int]]
"""Part of a target: dim -> rows [start, stop). Dims that are not named are whole."""
Shape = tuple[int, ...]

TOUCHED: dict[str, tuple[str | int, ...]] = {
    "Chunk": ("dim",),
    "Concatenate": ("dim",),
    "ErnieFuseAndSplitTextVisionExperts": ("concat_dim",),
    "Inkling2UnpadVocab": (0,),
    "Interleave": ("dim",),
    "MergeModulelist": (),
    "PermuteForRope": (0,),
    "Split": ("dim",),
    "Transpose": ("dim0", "dim1"),
}
"""Operation -> the dims of its result that it touches (a number, or the attribute that holds one). Others are left as
they are: proven in tests/unit/test_conversions.py. An operation that is not here may do anything, to every dim."""

STACKS: dict[str, str] = {"MergeModulelist": "dim", "ErnieFuseAndSplitTextVisionExperts": "stack_dim"}
"""Operation that stacks pieces (one an expert) -> the attribute with the dim it makes. Understood first in a chain and
on dim 0 only: a region of dim 0 then takes the pieces that lie in it."""

JOINS: tuple[tuple[str, ...], ...] = (("Concatenate",), ("MergeModulelist", "Concatenate"))
"""Chains that put sources one after the other: a region of the joined dim takes from each source what lies in it."""

BY_TRANSFORMERS: tuple[tuple[str, ...], ...] = (
    (),
    ("MergeModulelist",),
    ("Concatenate",),
    ("MergeModulelist", "Concatenate"),
    ("ErnieFuseAndSplitTextVisionExperts",),
)
"""Chains that Transformers' own loader runs on this rank's slices, where the sharded dims are untouched ones. It
cannot take others: it slices every source as if it were the first target, and shows operations the whole shapes."""


@dataclass
class Conversion:
    """What becomes one parameter, or several at once: the sources that Transformers collects for one converter.

    Attributes:
        name: the (first) target.
        targets: all of them.
        converter: a ``WeightConverter``; None where a tensor is only renamed.
        sources: the converter's pattern -> keys of the checkpoint, in the order in which they are converted.
    """

    name: str
    targets: tuple[str, ...]
    converter: Any
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """All sources."""
        return [key for keys in self.sources.values() for key in keys]

    @property
    def chain(self) -> tuple[str, ...]:
        """Class names of the operations; a name that is not Transformers' own gets a ``?``, so no list has it."""
        if self.converter is None:
            return ()
        from transformers import core_model_loading

        kinds = [type(operation) for operation in self.converter.operations]
        known = [getattr(core_model_loading, kind.__name__, None) is kind for kind in kinds]
        return tuple(kind.__name__ if own else f"{kind.__name__}?" for kind, own in zip(kinds, known, strict=True))

    @property
    def words(self) -> str:
        """For messages: the operations as Transformers prints them."""
        return "renaming" if self.converter is None else " then ".join(map(repr, self.converter.operations))

    def operation(self, name: str) -> Any:
        """The operation of that class, None where the chain has none."""
        return self.converter.operations[self.chain.index(name)] if name in self.chain else None


def free_dims(conversion: Conversion, sources: Mapping[str, Shape], targets: Mapping[str, Shape]) -> frozenset[int]:
    """Dims on which a part of the targets can be made of a part of the sources.

    Args:
        sources: shape of every source.
        targets: shape of every target.
    """
    shape = targets[conversion.name]
    if any(len(other) != len(shape) for other in targets.values()):
        return frozenset()
    untouched = set(range(len(shape))) - _touched(conversion, len(shape))
    agree = {
        dim
        for dim in untouched
        if len({other[dim] for other in targets.values()}) == 1 and _sources_agree(conversion, sources, shape, dim)
    }
    joined = joined_dim(conversion, len(shape))
    if joined is not None and _joined_size(conversion, sources, joined) == shape[joined]:
        agree.add(joined)
    return frozenset(agree)


def runs_on_slices(conversion: Conversion, free: frozenset[int], sharded: frozenset[int], ndim: int) -> bool:
    """Whether Transformers' own loader may convert slices along the ``sharded`` dims of the targets."""
    joined = joined_dim(conversion, ndim)
    return conversion.chain in BY_TRANSFORMERS and sharded <= free and joined not in sharded


def stacked(conversion: Conversion) -> bool:
    """Whether sources are pieces of dim 0 of the targets."""
    first = conversion.chain[0] if conversion.chain else ""
    return first in STACKS and getattr(conversion.converter.operations[0], STACKS[first]) == 0


def joined_dim(conversion: Conversion, ndim: int) -> int | None:
    """The dim on which a chain of :data:`JOINS` joins, counted in its target."""
    return conversion.operation("Concatenate").dim % ndim if conversion.chain in JOINS else None


def _touched(conversion: Conversion, ndim: int) -> set[int]:
    chain = conversion.chain
    if any(name not in TOUCHED or (name in STACKS and place > 0) for place, name in enumerate(chain)):
        return set(range(ndim))
    if chain and chain[0] in STACKS and not stacked(conversion):
        return set(range(ndim))
    dims: set[int] = set()
    for name, operation in zip(chain, conversion.converter.operations if chain else (), strict=True):
        dims |= {(where if isinstance(where, int) else getattr(operation, where)) % ndim for where in TOUCHED[name]}
    return dims


def _sources_agree(conversion: Conversion, sources: Mapping[str, Shape], target: Shape, dim: int) -> bool:
    """Whether every source has all of the target along ``dim``, or is a piece of it."""
    if not stacked(conversion):
        return all(len(sources[key]) == len(target) and sources[key][dim] == target[dim] for key in conversion.keys)
    if any(len(sources[key]) != len(target) - 1 for key in conversion.keys):
        return False
    if dim > 0:
        return all(sources[key][dim - 1] == target[dim] for key in conversion.keys)
    return all(len(keys) == target[0] * len(conversion.targets) for keys in conversion.sources.values())


def _joined_size(conversion: Conversion, sources: Mapping[str, Shape], dim: int) -> int:
    """Size of the joined dim, -1 where it cannot be told (pieces of different sizes)."""
    own = dim - 1 if stacked(conversion) else dim
    if any(len(sources[key]) <= own for key in conversion.keys):
        return -1
    if not stacked(conversion):
        return sum(sources[key][own] for key in conversion.keys)
    sizes = [{sources[key][own] for key in keys} for keys in conversion.sources.values()]
    return sum(next(iter(size)) for size in sizes) if all(len(size) == 1 for size in sizes) else -1


def source_regions(
    conversion: Conversion, sources: Mapping[str, Shape], ndim: int, region: Region
) -> dict[str, Region]:
    """Which part of which sources makes a region of the targets; sources that are not needed are left out.

    Args:
        sources: shape of every source.
        ndim: of the targets.
        region: of the targets, along free dims only.
    """
    joined, first_dim = joined_dim(conversion, ndim), 1 if stacked(conversion) else 0
    parts: dict[str, Region] = {}
    before = 0
    patterns = conversion.converter.source_patterns if conversion.converter is not None else conversion.sources
    for pattern in (pattern for pattern in patterns if pattern in conversion.sources):
        keys = conversion.sources[pattern]
        pieces = math.ceil(len(keys) / len(conversion.targets))
        for number, key in enumerate(keys):
            if first_dim and 0 in region and not region[0][0] <= number % pieces < region[0][1]:
                continue
            own = {dim - first_dim: rows for dim, rows in region.items() if dim >= first_dim}
            if joined in region:
                size = sources[key][joined - first_dim]
                start, stop = (min(max(row - before, 0), size) for row in region[joined])
                own[joined - first_dim] = (start, stop)
                before += 0 if first_dim else size
            parts[key] = own
        if joined in region and first_dim:
            before += sources[keys[0]][joined - first_dim]
    return parts
