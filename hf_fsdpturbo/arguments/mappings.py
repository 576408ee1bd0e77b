"""From what the user gave (a mapping, a JSON string, the path of a YAML/JSON file) to a dict of plain JSON types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, except that a key given twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        _refuse_twice([(key, None) for key in keys])
        return super().construct_mapping(node, deep)


def _refuse_twice(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{sorted({k for k in keys if keys.count(k) > 1})} given more than once. Keep one of them.")
    return result


def load_mapping_file(name: str, path: str) -> dict[str, Any]:
    """Read a YAML or JSON file that holds one mapping. ``name`` is the setting, for the error."""
    file = Path(path)
    if file.suffix not in (".yaml", ".yml", ".json"):
        raise ValueError(
            f"{name}={path!r} is neither a JSON mapping ('{{...}}') nor a path ending in .yaml, .yml or .json."
        )
    if not file.is_file():
        raise ValueError(f"{name}={path!r}: there is no such file ({file.resolve()}). Correct the path.")
    text = file.read_text(encoding="utf-8")
    try:
        if file.suffix == ".json":
            loaded = json.loads(text, object_pairs_hook=_refuse_twice)
        else:
            loaded = yaml.load(text, Loader=_StrictLoader)  # noqa: S506  (a SafeLoader)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{name}={path!r} cannot be read: {error}") from error
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
            value = json.loads(value, object_pairs_hook=_refuse_twice)
        except ValueError as error:
            raise ValueError(
                f"{name}={value!r} is not valid JSON: {error}. Write it as '{{\"key\": value}}'."
            ) from error
    return _plain_mapping(name, value)


def _plain_mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name} must be a mapping, a JSON string or the path of a YAML/JSON file, but it is {value!r} "
            f"({type(value).__name__})."
        )
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"{name} has the key {key!r} ({type(key).__name__}); keys must be strings.")
    return {key: _plain(f"{name} {key}", item) for key, item in value.items()}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return _plain_mapping(name, value)
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ValueError(f"{name} must be a plain JSON value, but it is {value!r} ({type(value).__name__}).")
