"""Settings that are written as text, in the environment or on a command line: which are numbers or truth values."""

from __future__ import annotations

import re
from typing import Any

from hf_fsdpturbo.bounded import cut
from hf_fsdpturbo.launch_config import ENV_PREFIX

INTEGERS = (
    "ep_size",
    "dp_size",
    "cp_size",
    "mp_replicate_size",
    "mp_shard_size",
    "ranks_per_node",
    "dist_timeout",
    "hang_timeout",
)
BOOLEANS = ("drop_unused_tensors", "verify_checkpoint", "save_quantized", "fsdpturbo_metrics", "freeze_routers")
_INTEGER = re.compile(r"[-+]?[0-9]{1,30}")
_PLAIN = re.compile(r"-?(0|[1-9][0-9]*)")
_TRUTH = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True),
    **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}
"""What HfArgumentParser takes for a truth value."""


def from_environment(name: str, text: str) -> Any:
    """The value of an environment variable: integers are read; names, paths and JSON stay text.

    Raises:
        ValueError: empty, no integer, or neither true nor false; names the variable.
    """
    variable = ENV_PREFIX + name.upper()
    if not text.strip():
        raise ValueError(f"The environment's {variable} is empty. Give it a value, or unset it.")
    if name in BOOLEANS:
        if text.strip().lower() not in ("true", "false"):
            raise ValueError(f"The environment's {variable} must be true or false, but it is {cut(text)}. Correct it.")
        return text.strip().lower() == "true"
    if name not in INTEGERS:
        return text
    try:
        if not _INTEGER.fullmatch(text.strip()):  # int() takes 1_0, and other scripts' digits
            raise ValueError(text)
        return int(text)
    except ValueError:
        raise ValueError(
            f"The environment's {variable} must be an integer, but it is {cut(text)}. Correct it."
        ) from None


def from_line(name: str, text: str | None) -> Any:
    """The value of ``--name text`` on a command line, or of text in a recipe's YAML; None: the name alone.

    Raises:
        ValueError: no whole number in plain digits, or no truth value; names the argument.
    """
    if name in INTEGERS and text is not None:
        if not _PLAIN.fullmatch(text):
            raise ValueError(f"--{name} must be a whole number, but it is {cut(text)}. Write it in plain digits.")
        return int(text) if len(text) < 4000 else text  # Python reads no more digits
    if name in BOOLEANS:
        if text is not None and text.lower() not in _TRUTH:
            raise ValueError(f"--{name} must be true or false, but it is {cut(text)}. Correct it.")
        return text is None or _TRUTH[text.lower()]
    return text
