"""Our fields of an accelerate YAML checked on their own, before a run: names, types and values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_fsdpturbo.arguments.sources import _flatten, _known
from hf_fsdpturbo.launch_config import YAML_PREFIX


def check_yaml_fields(fields: Mapping[str, Any], path: Path) -> None:
    """Check ``fsdp_turbo_<field>`` keys as a run does.

    Args:
        fields: values by name, prefix removed.
        path: the YAML, for the error.

    Raises:
        ValueError: a name nobody knows, a wrong type, or a value out of range.
    """
    known = _known(fields, f"fsdp_config of {path}", lambda name: YAML_PREFIX + name)
    _flatten(known, f"{path}, {YAML_PREFIX}...")
