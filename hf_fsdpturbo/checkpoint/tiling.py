"""Whether boxes make up a tensor: none outside, none missing, none twice."""

from __future__ import annotations

import math
from itertools import combinations

from hf_fsdpturbo.shards import Box

COMPARED = 1024
"""Boxes that are compared with each other, where they are no grid. DTensor always cuts grids."""


def check_tiles(size: tuple[int, ...], boxes: list[Box]) -> None:
    """Check that boxes tile a tensor.

    Args:
        size: of the tensor.
        boxes: without negative numbers.

    Raises:
        ValueError: a box outside of it, a gap, or an overlap; names the box.
    """
    for box in boxes:
        if len(box.offset) != len(size) or len(box.shape) != len(size):
            raise ValueError(f"a chunk at {box.offset} of shape {box.shape} is no part of {size}")
        if any(start + length > whole for start, length, whole in zip(box.offset, box.shape, size, strict=True)):
            raise ValueError(f"a chunk at {box.offset} of shape {box.shape} lies outside of {size}")
    filled = [box for box in boxes if 0 not in box.shape]
    held, whole = sum(math.prod(box.shape) for box in filled), math.prod(size)
    if held < whole:
        raise ValueError(f"its chunks hold {held} elements of {whole}")
    if held > whole:
        raise ValueError(f"its chunks overlap: they hold {held} elements, and it has {whole}")
    if len(filled) > 1 and not _is_grid(size, filled):
        _compare(filled)


def _is_grid(size: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether each dim is cut once for all, and every cell is there."""
    cells = 1
    for dim, whole in enumerate(size):
        cuts = sorted({(box.offset[dim], box.offset[dim] + box.shape[dim]) for box in boxes})
        ends = [0, *(stop for _, stop in cuts)]
        if [start for start, _ in cuts] != ends[:-1] or ends[-1] != whole:
            return False
        cells *= len(cuts)
    return cells == len(boxes) == len(set(boxes))


def _compare(boxes: list[Box]) -> None:
    if len(boxes) > COMPARED:
        raise ValueError(f"its {len(boxes)} chunks are no grid")
    for one, two in combinations(boxes, 2):
        sides = zip(one.offset, one.shape, two.offset, two.shape, strict=True)
        if all(max(a, b) < min(a + m, b + n) for a, m, b, n in sides):
            raise ValueError(f"its chunks at {one.offset} and {two.offset} overlap")
