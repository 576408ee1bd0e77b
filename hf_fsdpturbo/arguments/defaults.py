"""Default values that can be told from the same value given by the user: subclasses of int, str and dict.

A dataclass hands a field's default object on as it is, and so do argparse and HfArgumentParser; a value that the user
writes is a plain int, str or dict. The subclasses compare, print, pickle and turn into JSON as their parent does.
"""

from __future__ import annotations

from typing import Any


class UnsetInt(int):
    """An integer nobody gave: a default, or a value that was worked out from other fields."""


class UnsetStr(str):
    """A text nobody gave."""


class UnsetDict(dict[str, Any]):
    """A mapping nobody gave."""


def is_given(value: Any) -> bool:
    """Whether a public field's value was given. None never was: it means "as if left out"."""
    return value is not None and not isinstance(value, UnsetInt | UnsetStr | UnsetDict)
