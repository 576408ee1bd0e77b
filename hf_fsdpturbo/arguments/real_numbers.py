"""Fields that are real numbers above 0, from whatever source."""

from __future__ import annotations

import re
from typing import Any

from hf_fsdpturbo.topology import at_most

_REAL = re.compile(r"[-+]?[0-9]{0,30}\.?[0-9]{1,30}([eE][-+]?[0-9]{1,3})?")


def check_real(name: str, value: Any) -> float:
    """The value as a float. It may be text: the environment has no other type, and YAML takes 1e-3 for text.

    Raises:
        ValueError: no number, or none above 0.
    """
    if isinstance(value, str) and _REAL.fullmatch(value.strip()):
        value = float(value)
    at_most(name, value)
    return float(value)
