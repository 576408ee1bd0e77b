"""From what the user gave (a mapping, a JSON string, the path of a YAML/JSON file) to a dict of plain JSON types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_fsdpturbo.bounded import DEPTH, check_path, cut, parse_json, read_settings


def load_mapping_file(name: str, path: str) -> dict[str, Any]:
    """Read a YAML or JSON file that holds one mapping. ``name`` is the setting, for the error."""
    check_path(name, path)
    if not path.endswith((".yaml", ".yml", ".json")):
        raise ValueError(
            f"{name}={cut(path)} is neither a JSON mapping ('{{...}}') nor a path ending in .yaml, .yml or .json."
        )
    try:
        loaded = read_settings(path)
    except FileNotFoundError:
        raise ValueError(
            f"{name}={cut(path)}: there is no such file ({cut(str(Path(path).resolve()))[1:-1]}). Correct the path."
        ) from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{name}={cut(path)} cannot be read: {error}") from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{name}={cut(path)} must hold a mapping, but it holds {cut(loaded)}. Correct the file.")
    return _plain_mapping(name, loaded)


def parse_mapping(name: str, value: Any) -> dict[str, Any]:
    """What the user gave for ``name`` (mapping, JSON string, YAML/JSON path) as a dict of plain JSON types.

    Raises:
        ValueError: it is none of these, the file is missing or unreadable, or a key is given twice.
    """
    if isinstance(value, str):
        if not value.lstrip().startswith("{"):
            return load_mapping_file(name, value)
        try:
            value = parse_json(value, name)
        except ValueError as error:
            raise ValueError(f"{name}={cut(value)}: {error} Write it as '{{\"key\": value}}'.") from error
    return _plain_mapping(name, value)


def _plain_mapping(name: str, value: Any, depth: int = 0) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name} must be a mapping, a JSON string or the path of a YAML/JSON file, but it is {cut(value)} "
            f"({type(value).__name__})."
        )
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"{name} has the key {cut(key)} ({type(key).__name__}); keys must be strings.")
    return {key: _plain(f"{name} {cut(key)[1:-1]}", item, depth) for key, item in value.items()}


def _plain(name: str, value: Any, depth: int) -> Any:
    if depth > DEPTH:
        raise ValueError(f"{name[:DEPTH]} holds values more than {DEPTH} deep. Correct it.")
    if isinstance(value, Mapping):
        return _plain_mapping(name, value, depth + 1)
    if isinstance(value, list | tuple):
        return [_plain(name, item, depth + 1) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ValueError(f"{name} must be a plain JSON value, but it is {cut(value)} ({type(value).__name__}).")
