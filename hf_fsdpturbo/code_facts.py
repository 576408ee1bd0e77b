"""The function whose byte code or source is read as a fact, or a named error: a "no" must not be a decorator's doing.

Some facts of a modeling file are written nowhere but in its code: which global its forward calls, what it passes on.
They are read from ``code_of(function)``. A decorator that keeps ``__wrapped__`` (``functools.wraps``) is looked
through; behind any other one the code read would be the decorator's, and every question would get the answer no.
"""

from __future__ import annotations

import inspect
import types
import warnings
from typing import Any

from torch import nn


class HiddenCode(ValueError):
    """A function whose code cannot be read: built in, a callable object, or behind a decorator that hides it."""


class HiddenCodeWarning(UserWarning):
    """The same, or a fact not found where one must be, for those who can go on without the answer."""


def function_of(function: Any, name: str, asked: str) -> types.FunctionType:
    """The Python function behind ``function`` and the decorators that say what they wrap.

    Args:
        function: a function or bound method.
        name: what it is called in the error.
        asked: what is to be read of it, in words: "whether it calls torch.topk".

    Raises:
        HiddenCode: there is none, or it is a decorator's wrapper that does not say what it wraps.
    """
    return functions_of(function, name, asked)[-1]


def functions_of(function: Any, name: str, asked: str) -> list[types.FunctionType]:
    """As :func:`function_of`, with the decorators' wrappers in front of it, outermost first."""
    found = [getattr(function, "__func__", function)]
    while (inner := getattr(found[-1], "__wrapped__", None)) is not None:
        found.append(getattr(inner, "__func__", inner))
    kinds = [type(each).__name__ for each in found if not isinstance(each, types.FunctionType)]
    if not kinds and _is_wrapper(found[-1]):
        kinds = ["a wrapper that does not say what it wraps"]
    if kinds:
        raise HiddenCode(
            f"{name} cannot be read ({kinds[0]}), so hf_fsdpturbo cannot tell {asked}. Decorate it with "
            "functools.wraps, or do not decorate it."
        )
    return found


def _is_wrapper(function: types.FunctionType) -> bool:
    """A function made inside another one, which takes anything and closes over a function: it hands its call on."""
    is_local = "." not in function.__qualname__.rpartition("<locals>.")[2] and "<locals>." in function.__qualname__
    takes_anything = bool(function.__code__.co_flags & inspect.CO_VARARGS)
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return is_local and takes_anything and any(callable(value) for value in held)


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a variable of the outer function that is not set yet
        return False
    return True


def forward_of(module: nn.Module, asked: str) -> types.FunctionType:
    """The Python function of a module's class that computes it, what is set on the instance apart.

    Raises:
        HiddenCode: as :func:`function_of`.
    """
    return function_of(type(module).forward, f"{type(module).__name__}.forward", asked)


def forward_or_warning(module: nn.Module, asked: str) -> types.FunctionType | None:
    """:func:`forward_of`, or None with a :class:`HiddenCodeWarning`: for questions asked of all modules of a model."""
    try:
        return forward_of(module, asked)
    except HiddenCode as error:
        warn(f"{error} Taken as no.")
        return None


def warn(message: str) -> None:
    """A :class:`HiddenCodeWarning` (Python shows one text once)."""
    warnings.warn(f"[hf_fsdpturbo] {message}", HiddenCodeWarning, stacklevel=3)
