"""Which tensors one conversion of Transformers needs together for an export, and whether it goes expert by expert.

Shapes: E experts of a stack.

Note [how a conversion is shown to go row by row]: Transformers numbers experts from 0 in whatever stack it is given,
so a rank's own stack would get the names of the first experts. So a stack of all E is shown to it, once for each kind
of layer, with its widths cut to :data:`PROBE_WIDTH` and its elements numbered so that each tells its row. Where every
output is what one row gives (per-expert names), or the rows' outputs one after another (stacks again), the real
stacks are converted a row at a time. Names and shapes never come from the probe: Transformers converts the real
shapes on meta. What cannot be shown is converted whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hf_fsdpturbo.ranks import FAILURES

PROBE_WIDTH = 12
"""Divides by 2, 3, 4 and 6: gate and up halves, interleaved pairs, fused thirds."""


@dataclass(frozen=True)
class Group:
    """Tensors that one conversion takes together.

    Attributes:
        sources: names in the model, in the order in which Transformers meets them.
        rule: what tells the conversion from others: the pattern that each source matched, empty where none did.
    """

    sources: tuple[str, ...]
    rule: tuple[str, ...]


@dataclass(frozen=True)
class RowWise:
    """A conversion that goes row by row.

    Attributes:
        place: for each output of the whole conversion, its row and its place among the outputs of one row; None where
            the outputs are stacks again, row after row.
    """

    place: tuple[tuple[int, int], ...] | None


@contextlib.contextmanager
def rules_kept(model: PreTrainedModel) -> Iterator[list[Any]]:
    """The conversions that ``revert_weight_conversion`` will revert; while open they are not worked out in each call.

    A model that was not loaded has none of its own: Transformers walks all its modules for them (5 ms a call).
    """
    own: list[Any] | None = getattr(model, "_weight_conversions", None)
    if own is not None:
        yield own
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    found = get_model_conversion_mapping(model, add_legacy=False)
    kept = [rule for rule in found if not isinstance(rule, PrefixChange)]
    cast(Any, model)._weight_conversions = kept
    try:
        yield kept
    finally:
        del cast(Any, model)._weight_conversions


def find_groups(rules: list[Any], names: list[str]) -> list[Group]:
    """Sort converted tensors into the conversions that take them, by the names Transformers gives them on the way.

    Args:
        rules: of :func:`rules_kept`.
        names: tensors that some conversion changes.
    """
    from transformers.core_model_loading import WeightConverter, dot_natural_key

    reversed_rules = [rule.reverse_transform() for rule in reversed(rules) if isinstance(rule, WeightConverter)]
    found: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        for index, rule in enumerate(reversed_rules):
            renamed, pattern = rule.rename_source_key(name)
            if pattern is not None:
                found.setdefault((index, renamed), []).append((name, pattern))
                break
        else:
            found.setdefault((-1, name), []).append((name, ""))
    return [
        Group(tuple(name for name, _ in sources), (str(index), *(pattern for _, pattern in sources)))
        for (index, _), sources in found.items()
    ]


class RowProof:
    """Shows for each kind of conversion once whether it goes row by row; layers alike are one kind."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[Any, RowWise | None] = {}

    def of(self, group: Group, tensors: dict[str, Tensor], num_outputs: int) -> RowWise | None:
        """How a group's conversion goes row by row; None: it does not, or that cannot be shown.

        Args:
            group: its sources are stacks ``[E, ...]`` where there is something to show.
            tensors: only their shapes are read.
            num_outputs: of the whole conversion.
        """
        shapes = [tuple(tensors[name].shape) for name in group.sources]
        rows = shapes[0][0] if shapes[0] else 0
        stacks = all(len(shape) > 1 and shape[0] == rows for shape in shapes)
        if rows < 2 or not stacks or (num_outputs % rows and any(len(shape) < 3 for shape in shapes)):
            return None
        small = tuple((rows, *(min(size, PROBE_WIDTH) for size in shape[1:])) for shape in shapes)
        kind = (group.rule, small)
        if kind not in self._known:
            self._known[kind] = self._probe(group, small)
        return self._known[kind]

    def _probe(self, group: Group, shapes: tuple[tuple[int, ...], ...]) -> RowWise | None:
        rows = shapes[0][0]
        stride = max(torch.Size(shape[1:]).numel() for shape in shapes)
        numbered = {}
        for index, (name, shape) in enumerate(zip(group.sources, shapes, strict=True)):
            own = torch.arange(torch.Size(shape[1:]).numel()).reshape(1, *shape[1:])
            steps = torch.arange(rows).reshape(rows, *[1] * (len(shape) - 1)) * stride
            numbered[name] = own + steps + index * rows * stride
        try:
            whole = list(revert_weight_conversion(self._model, dict(numbered)).values())
            one = list(revert_weight_conversion(self._model, {n: t[:1] for n, t in numbered.items()}).values())
        except FAILURES:  # it looks at widths, which are not the real ones here
            return None
        if any(tensor.numel() == 0 for tensor in (*whole, *one)):
            return None
        if len(whole) == rows * len(one):
            return _one_by_one(whole, one, rows, stride)
        return _row_after_row(whole, one, rows, stride)


def _one_by_one(whole: list[Tensor], one: list[Tensor], rows: int, stride: int) -> RowWise | None:
    """Every output is an output of row 0, with the numbers of another row."""
    known = {_content(tensor): place for place, tensor in enumerate(one)}
    places = []
    for tensor in whole:
        row = int(tensor.reshape(-1)[0]) // stride % rows
        place = known.get(_content(tensor - row * stride))
        if place is None:
            return None
        places.append((row, place))
    return RowWise(tuple(places)) if len(set(places)) == len(whole) else None


def _row_after_row(whole: list[Tensor], one: list[Tensor], rows: int, stride: int) -> RowWise | None:
    """Every output is a stack of what the rows give."""
    if len(whole) != len(one):
        return None
    for stack, first in zip(whole, one, strict=True):
        if stack.ndim == 0 or stack.shape != (rows, *first.shape[1:]) or first.shape[:1] != (1,):
            return None
        steps = torch.arange(rows).reshape(rows, *[1] * (stack.ndim - 1)) * stride
        if not torch.equal(stack, first + steps):
            return None
    return RowWise(None)


def _content(tensor: Tensor) -> tuple[tuple[int, ...], bytes]:
    return tuple(tensor.shape), tensor.contiguous().numpy().tobytes()
