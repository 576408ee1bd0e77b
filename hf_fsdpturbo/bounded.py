"""YAML and JSON that others wrote, read within bounds: an error names file, line and key, and cuts long values."""

from __future__ import annotations

import json
import os
import re
import stat
from typing import Any

import yaml

SETTINGS_BYTES = 256 * 1024
"""A file of settings; PyYAML reads about 100 KB a second."""
DATA_BYTES = 256 * 1024 * 1024
"""A JSON file beside weights: the index of the largest release has 10 MB."""
DEPTH = 24
NODES = 20_000
"""What a YAML text may come to once every alias is written out."""
SHOWN = 160

_OCTAL = re.compile(r"[-+]?0[0-9_]+")


def cut(value: Any, shown: int = SHOWN) -> str:
    """``repr(value)`` for a message, its middle left out where it is long; of whatever no repr can be made, its class.

    It has no lone surrogates, which cannot be printed.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits; a list that holds itself
        return f"<a {type(value).__name__} too large to show>"
    if len(text) > shown:
        text = f"{text[: shown - 30]}... ({len(text)} characters)"
    return text.encode("utf-8", "backslashreplace").decode()


def read_text(path: str, most: int = SETTINGS_BYTES) -> str:
    """A text file of at most so many bytes.

    Raises:
        ValueError: no regular file, too large, or not UTF-8; names the file.
        FileNotFoundError: there is none.
    """
    check_path("path", path)
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):  # opening a pipe would wait for a writer
        raise ValueError(f"{path} is not a file. Correct the path.")
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, too many for such a file. Correct the path.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 text ({error.reason}). Save the file as UTF-8.") from error


def check_path(name: str, path: Any) -> None:
    """Refuse what no file can be called.

    Raises:
        ValueError: empty, with a NUL in it, or not to be written in UTF-8; names the setting.
    """
    text = os.fspath(path)
    if not text.strip():
        raise ValueError(f"{name} is {text!r}, an empty path. Give a path, or leave {name} out.")
    if "\0" in text:
        raise ValueError(f"{name}={cut(text)} has a NUL character, which no path may have. Correct the path.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name}={cut(text)} has half a character pair (a lone surrogate). Correct it.") from None


# JSON


def parse_json(text: str, where: str) -> Any:
    """JSON in which no key is given twice.

    Args:
        text: the JSON.
        where: what it is (a file, a setting), for messages.

    Raises:
        ValueError: naming ``where``, and line or key.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise _Twice(twice)
        return result

    try:
        return json.loads(text, object_pairs_hook=once)
    except _Twice as error:
        line = text[: max(0, text.rfind(json.dumps(error.keys[0])))].count("\n") + 1
        raise ValueError(
            f"{where}, line {line}: {cut(error.keys)} given more than once. Keep one of them."
        ) from None
    except RecursionError:
        raise ValueError(f"{where} has brackets inside brackets, too deep to read. Correct it.") from None
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {_short(error)}. Correct it.") from error


class _Twice(Exception):
    def __init__(self, keys: list[str]) -> None:
        super().__init__(keys)
        self.keys = keys


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


# YAML


class _BoundedLoader(yaml.SafeLoader):
    """YAML's safe loader; the nodes are judged before anything is built from them."""

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self.where, self.depth = where, 0
        self.sizes: dict[int, tuple[int, int]] = {}
        self.open: set[int] = set()

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > DEPTH:
            mark: Any = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise self.fault(mark, "", f"nested more than {DEPTH} deep. Correct it")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def fault(self, mark: Any, key: str, text: str) -> ValueError:
        name = f" {key}:" if key else ""
        return ValueError(f"{self.where}, line {mark.line + 1}:{name} {text}.")

    def judge(self, node: yaml.Node, key: str) -> tuple[int, int]:
        """(depth, nodes) of what a node comes to.

        Raises:
            ValueError: it holds itself, is too large, has a key twice, or a number that YAML reads in its own way.
        """
        if id(node) in self.open:
            raise self.fault(node.start_mark, key, "holds itself. Write it out")
        if id(node) in self.sizes:
            return self.sizes[id(node)]
        self.open.add(id(node))
        children: list[tuple[yaml.Node, str]] = []
        if isinstance(node, yaml.MappingNode):
            children = self.items(node, key)
        elif isinstance(node, yaml.SequenceNode):
            children = [(item, f"{key}[{place}]") for place, item in enumerate(node.value)]
        elif isinstance(node, yaml.ScalarNode):
            self.check_number(node, key)
        below = [self.judge(*child) for child in children]
        depth = 1 + max((depth for depth, _ in below), default=0)
        nodes = 1 + sum(nodes for _, nodes in below)
        if depth > DEPTH or nodes > NODES:
            raise self.fault(node.start_mark, key, f"comes to more than {NODES} values or {DEPTH} levels. Shorten it")
        self.open.discard(id(node))
        self.sizes[id(node)] = depth, nodes
        return depth, nodes

    def items(self, node: yaml.MappingNode, key: str) -> list[tuple[yaml.Node, str]]:
        seen: set[Any] = set()
        children: list[tuple[yaml.Node, str]] = []
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise self.fault(name.start_mark, key, "a key must be a name, not a list or a mapping")
            if name.tag == "tag:yaml.org,2002:merge":
                children.append((value, key))
                continue
            own = self.scalar(name, key)
            if own in seen:
                raise self.fault(name.start_mark, key, f"{cut([own])} given more than once. Keep one of them")
            seen.add(own)
            label = cut(str(own))[1:-1]
            children += [(name, label), (value, f"{key}.{label}" if key else label)]
        return children

    def scalar(self, node: yaml.ScalarNode, key: str) -> Any:
        try:
            return self.construct_object(node, deep=True)  # type: ignore[no-untyped-call]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:  # of PyYAML's constructors
            text = f"{cut(node.value)} is no {node.tag.rpartition(':')[2]}. Correct it"
            raise self.fault(node.start_mark, key, text) from error

    def check_number(self, node: yaml.ScalarNode, key: str) -> None:
        """YAML 1.1 reads 010 as 8, 1:30 as 90 and 1_0 as 10: refused, whatever was meant."""
        kind, text = node.tag.rpartition(":")[2], node.value
        value = self.scalar(node, key)
        if kind not in ("int", "float") or node.style is not None:
            return
        if _OCTAL.fullmatch(text) or ":" in text or "_" in text:
            fix = f"YAML reads {cut(text)} as {value}. Write {value}, or put the text into quotes"
            raise self.fault(node.start_mark, key, fix)


def parse_yaml(text: str, where: str) -> Any:
    """One YAML document of plain values.

    Args:
        text: the YAML.
        where: what it is (a file, a setting), for messages.

    Raises:
        ValueError: naming ``where``, line and key: not YAML, a key twice, too large or too deep, aliases that come to
            more, a value that holds itself, a number that YAML reads otherwise than it looks.
    """
    try:
        loader = _BoundedLoader(text, where)
        node = loader.get_single_node()  # type: ignore[no-untyped-call]
        if node is None:
            return None
        loader.judge(node, "")
        return loader.construct_document(node)  # type: ignore[no-untyped-call]
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = _short(ValueError(error.problem or error.context))
        raise ValueError(f"{where}{line}: {problem}. Correct it.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {_short(error)}. Correct it.") from error


def read_settings(path: str) -> Any:
    """A YAML or JSON file of settings, by its ending.

    Raises:
        ValueError: naming file, line and key.
        FileNotFoundError: there is none.
    """
    text = read_text(path)
    return parse_json(text, path) if path.endswith(".json") else parse_yaml(text, path)
