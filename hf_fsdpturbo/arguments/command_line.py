"""What a recipe's command line and ``--config`` file may not hold, which TRL's parser would take in its own way."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hf_fsdpturbo.arguments.sources import INTEGERS
from hf_fsdpturbo.bounded import cut, parse_yaml, read_text

_PLAIN = re.compile(r"-?(0|[1-9][0-9]*)")


def check_command_line(arguments: Sequence[str]) -> None:
    """Look at the sizes on the line and at the file that it names.

    Raises:
        ValueError: naming the argument, or file, line and key.
    """
    for name, value in zip(arguments, arguments[1:], strict=False):
        if name.removeprefix("--") in INTEGERS and name.startswith("--") and not _PLAIN.fullmatch(value):
            raise ValueError(f"{name} must be a whole number, but it is {cut(value)}. Write it in plain digits.")
    if "--config" not in arguments:
        return
    place = arguments.index("--config") + 1
    if place == len(arguments):
        raise ValueError("--config names no file. Give the path of a YAML after it.")
    path = arguments[place]
    try:
        content = parse_yaml(read_text(path), path)
    except OSError as error:
        raise ValueError(f"--config {cut(path)} cannot be read: {error}. Correct the path.") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"--config {path} must be a mapping of argument names, but it is {cut(content)}. Correct it.")
