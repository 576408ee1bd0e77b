"""How tensors lie on all ranks: boxes by rank, found once for all tensors that are spread alike, asked for by rows.

*Rows* are indices of dim 0; boxes see ``shards.py``. A model has thousands of tensors and about a dozen layouts, so
what ranks exchange, and what they keep, grows with ranks times layouts.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_fsdpturbo.ranks import agree, everyone
from hf_fsdpturbo.shards import Box, local_box


class Layout:
    """Who holds which box of a tensor.

    Args:
        shape: of the whole tensor.
        box_of: by rank; a box without elements holds nothing.

    Raises:
        ValueError: the boxes do not make up the tensor.
    """

    def __init__(self, shape: tuple[int, ...], box_of: list[Box]) -> None:
        self.shape, self.box_of = shape, box_of
        held: dict[Box, list[int]] = {}
        for owner, box in enumerate(box_of):
            if 0 not in box.shape:
                held.setdefault(box, []).append(owner)
        self.holders = dict(sorted(held.items()))
        covered = sum(math.prod(box.shape) for box in self.holders)
        if covered != math.prod(shape):
            raise ValueError(f"the ranks' parts hold {covered} elements of {math.prod(shape)}.")
        self._boxes = list(self.holders)
        self._starts = [box.offset[0] for box in self._boxes] if shape else []
        self._tallest = max((box.shape[0] for box in self._boxes), default=0) if shape else 0

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[Box, list[int]]]:
        """Boxes with some of the rows, in order, and the ranks that hold each."""
        first = bisect_right(self._starts, start - self._tallest)
        for box in self._boxes[first : bisect_left(self._starts, stop)]:
            if box.offset[0] + box.shape[0] > start:
                yield box, self.holders[box]

    def owners(self, start: int, stop: int) -> list[int]:
        """Ranks that hold all of the rows; empty if no rank has them whole."""
        for box, owners in self.overlapping(start, stop):
            if box.rows(start, stop) == (start, stop) and box.shape[1:] == self.shape[1:]:
                return owners
        return []

    def sharers(self, start: int, stop: int) -> list[int]:
        """Ranks that hold some of the rows."""
        return sorted({owner for _, owners in self.overlapping(start, stop) for owner in owners})


def find_layouts(tensors: dict[str, Tensor]) -> dict[str, Layout]:
    """The layout of each tensor, the same object for those that are spread alike; collective.

    Raises:
        CheckpointError: on every rank: a shard that DTensor cannot describe, boxes that do not make up a tensor, or
            ranks whose tensors are not alike in the same way.
    """
    error: Exception | None = None
    kinds: dict[Any, int] = {}
    kind_of: dict[str, int] = {}
    boxes: list[Box] = []
    try:
        for name, tensor in tensors.items():
            kind = kinds.setdefault(_kind(tensor), len(kinds))
            kind_of[name] = kind
            box = local_box(tensor)
            if kind == len(boxes):
                boxes.append(box)
            elif boxes[kind] != box:
                raise ValueError(f"{name}: this rank holds {box}, and {boxes[kind]} of a tensor spread alike.")
    except ValueError as caught:
        error = caught
    agree(error, "reading the sharding")
    theirs = everyone((_digest(kind_of), boxes))
    layouts: list[Layout] = []
    try:
        if len({digest for digest, _ in theirs}) > 1:
            raise ValueError("the ranks hold other tensors, or tensors that are spread in other ways.")
        example = {kind: tensors[name] for name, kind in reversed(kind_of.items())}
        for kind in range(len(boxes)):
            layouts.append(Layout(tuple(example[kind].shape), [own[kind] for _, own in theirs]))
    except ValueError as caught:
        error = caught
    agree(error, "reading the sharding")
    return {name: layouts[kind] for name, kind in kind_of.items()}


def _kind(tensor: Tensor) -> Any:
    """What is equal for tensors that are spread alike; a local matter, meshes may be others on other ranks."""
    if isinstance(tensor, DTensor):
        return tuple(tensor.shape), tensor.device_mesh, tensor.placements
    return tuple(tensor.shape)


def _digest(kind_of: dict[str, int]) -> str:
    return hashlib.sha256("\n".join(f"{name} {kind}" for name, kind in kind_of.items()).encode()).hexdigest()
