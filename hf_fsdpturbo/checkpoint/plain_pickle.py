"""A pickle of known classes, read without calling, building or changing anything that it names."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Collection
from typing import Any

import torch

Names = Collection[tuple[str, str]]
"""(module, name) of what a pickle may name."""

_ABSENT = object()
_OPERATIONS = frozenset(
    "PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD "
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE EMPTY_DICT EMPTY_LIST "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 DICT LIST SETITEM SETITEMS APPEND APPENDS".split()
)
"""What pickles of plain objects consist of. Others may ask for more memory than there is."""


class Part:
    """Stands in for an object: keeps its state, whatever that is, and does nothing."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = _ABSENT) -> Any:
        """One of its attributes.

        Raises:
            ValueError: it has none of that name.
        """
        state = self.state if isinstance(self.state, dict) else {}
        if name not in state and default is _ABSENT:
            raise ValueError(f"an entry without {name!r}")
        return state.get(name, default)


class _Value:
    """Stands in for a shape, a layout, a path: what is called with values gives these."""

    def __new__(cls, *values: Any) -> Any:
        return values[0] if len(values) == 1 else values


class _Unpickler(pickle.Unpickler):
    """Knows the given names, as stand-ins, and dtypes."""

    def __init__(self, raw: bytes, objects: Names, values: Names) -> None:
        super().__init__(io.BytesIO(raw))
        self.objects, self.values = objects, values

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.objects:
            return type(name, (Part,), {})  # of this load alone, whatever a pickle does to it
        if (module, name) in self.values:
            return type(name, (_Value,), {})
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise ValueError(f"it names {module[:60]}.{name[:60]}, which is no part of an index")


_UNREADABLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
)


def load(raw: bytes, objects: Names, values: Names, *, known: bool = False) -> Any:
    """What a pickle holds.

    Args:
        raw: its bytes.
        objects: what it may build: :class:`Part` of that name.
        values: what it may call: gives its arguments.
        known: the bytes are those that this package wrote, so their operations need not be looked at first.

    Raises:
        ValueError: not a pickle, or one that names or does something else.
    """
    if not known:
        _check_operations(raw)
    try:
        return _Unpickler(raw, objects, values).load()
    except _UNREADABLE as error:
        raise ValueError(f"{type(error).__name__}: {str(error)[:200]}") from error


def _check_operations(raw: bytes) -> None:
    """Look at every operation without doing it: one number in a pickle can ask for all memory."""
    number = 0
    for operation, argument, _ in pickletools.genops(raw):
        number += 1
        if operation.name not in _OPERATIONS:
            raise ValueError(f"it has a {operation.name}, which is no part of an index")
        if operation.name in ("BINPUT", "LONG_BINPUT") and (argument or 0) > number:
            raise ValueError("it numbers what it holds out of order")


def shown(value: Any) -> str:
    """A value for a message, or its kind where it may be large."""
    return repr(value)[:100] if isinstance(value, (str, bool)) or _is_small(value) else f"a {type(value).__name__}"


def _is_small(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < 2**64
