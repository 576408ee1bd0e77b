"""What a recipe's command line and ``--config`` file may not hold, which TRL's parser would take in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hf_fsdpturbo.arguments.setting_texts import from_line
from hf_fsdpturbo.arguments.sources import PUBLIC_DEFAULTS
from hf_fsdpturbo.bounded import cut, parse_yaml, read_text


def options_on_line(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Every option as it is spelled, without ``--``, and the text after it; None where there is none.

    Args:
        arguments: ``--name text``, ``--name=text`` or ``--name``.
    """
    for place, word in enumerate(arguments):
        head, equals, text = word.partition("=")
        if not head.startswith("--") or head == "--":
            continue
        following = arguments[place + 1] if place + 1 < len(arguments) else "--"
        alone = None if following.startswith("--") else following
        yield head[2:], text if equals else alone


def words_by_name(arguments: Sequence[str]) -> dict[str, str | None]:
    """As :func:`options_on_line`, by name: the last of one counts, and a dash is as good as an underscore."""
    return {name.replace("-", "_"): text for name, text in options_on_line(arguments)}


def settings_on_line(arguments: Sequence[str]) -> dict[str, Any]:
    """Our fields that a command line gives, by name, as a run takes them.

    Raises:
        ValueError: a size in other than plain digits, or no truth value; names the argument.
    """
    ours = {name: text for name, text in words_by_name(arguments).items() if name in PUBLIC_DEFAULTS}
    return {name: from_line(name, text) for name, text in ours.items()}


def check_command_line(arguments: Sequence[str]) -> None:
    """Look at our fields on the line and at the file that it names.

    Raises:
        ValueError: naming the argument, or file, line and key.
    """
    settings_on_line(arguments)
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
