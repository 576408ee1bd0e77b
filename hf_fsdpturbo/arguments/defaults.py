"""Default values that can be told from the same value given by the user: subclasses of int, float, str and dict.

A dataclass hands a field's default object on as it is, and so do argparse and HfArgumentParser; a value that the user
writes is a plain int, float, str or dict. The subclasses compare, print, pickle and turn into JSON as their parents
do.
"""

from __future__ import annotations

from typing import Any


class UnsetInt(int):
    """An integer nobody gave: a default, or a value that was worked out from other fields."""


class UnsetFloat(float):
    """A number nobody gave."""


class UnsetStr(str):
    """A text nobody gave."""


class UnsetDict(dict[str, Any]):
    """A mapping nobody gave."""


def is_given(value: Any) -> bool:
    """Whether a public field's value was given. None never was: it means "as if left out"."""
    return value is not None and not isinstance(value, UnsetInt | UnsetFloat | UnsetStr | UnsetDict)
