"""Reads the package's sources for upstream names it should not know: private ones, set ones, facts of byte code.

Upstream is everything that is neither this package nor the standard library.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hf_fsdpturbo"
# How a fact is read of code: the attributes and functions that give it.
FACTS = {"co_names", "co_consts", "co_varnames", "__globals__", "getsource"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def sources(package: Path = PACKAGE) -> dict[str, ast.Module]:
    """Syntax trees by path below the package."""
    return {
        path.relative_to(package).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_upstream(module: str) -> bool:
    top = module.partition(".")[0]
    return top != "hf_fsdpturbo" and top not in sys.stdlib_module_names


def own_names(trees: dict[str, ast.Module]) -> set[str]:
    """Methods, class variables and attributes set on ``self`` by classes of the package."""
    found = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            found |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            found |= {
                target.id
                for part in node.body
                for target in getattr(part, "targets", [getattr(part, "target", None)])
                if isinstance(target, ast.Name)
            }
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
    return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _imported(tree: ast.Module, wanted: Callable[[str], bool]) -> set[str]:
    """Names under which a file has modules, classes or functions of the ``wanted`` modules."""
    return {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if wanted(node.module or "hf_fsdpturbo" if isinstance(node, ast.ImportFrom) else alias.name)
    }


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == "hf_fsdpturbo"


def private_names(tree: ast.Module, own: set[str]) -> set[str]:
    """Private names of upstream that a file imports, reads, sets or spells in ``getattr`` and ``__dict__[...]``."""
    found = set()
    ours = _imported(tree, is_ours)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_upstream(node.module or "hf_fsdpturbo"):
            for alias in node.names:
                if any(is_private(part) for part in f"{node.module}.{alias.name}".split(".")):
                    found.add(alias.name)
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            if not (isinstance(node.value, ast.Name) and node.value.id in ours):
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            if is_private(node.value) and node.value not in own:
                found.add(node.value)
    return found


def facts_read(tree: ast.Module) -> set[str]:
    """Ways of :data:`FACTS` in which a file reads code."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in FACTS}


def names_set(tree: ast.Module, own: set[str]) -> set[str]:
    """Attributes that a file sets or deletes on something other than ``self``, autograd contexts apart.

    On what is imported from upstream any name counts, on other objects those that no class of ours has.
    """
    found = set()
    upstream = _imported(tree, is_upstream)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            name = node.value.id if isinstance(node.value, ast.Name) else ""
            if name in upstream or (name not in ("self", "cls", "ctx") and node.attr not in own):
                found.add(node.attr)
    return found


def mentions(tree: ast.AST) -> set[str]:
    """Every identifier of a file: names, attributes, arguments, imports, definitions, and strings without a space."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.keyword, ast.arg)) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.update(node.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found.update(node.value.split("."))
    return found
