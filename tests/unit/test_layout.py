"""The layout of the package, which no linter checks: who imports what is optional, names of files, empty faces."""

from __future__ import annotations

import ast
import configparser
from collections import Counter
from pathlib import Path

import pytest

from hf_fsdpturbo.compat import OPTIONAL
from tests.support.upstream_scan import PACKAGE, sources

SOURCES = sources()

# The files that import each optional package, also by name: one, but kernels may fill several.
OWNERS: dict[str, list[str]] = {
    "bitsandbytes": ["quantised/four_bit.py"],
    "fla": ["kernels/fla.py"],
    "fsdp_turbo": ["sharding/fsdp_turbo.py"],
    "liger_kernel": ["kernels/liger.py"],
    "peft": ["lora/adapter.py"],
    "torch_npu": ["ops/npu.py"],
    "triton": [
        "ops/triton.py",
        "ops/triton_adamw.py",
        "ops/triton_cross_entropy.py",
        "ops/triton_router_load.py",
        "ops/triton_rows.py",
        "ops/triton_sort.py",
        "ops/triton_swiglu.py",
    ],
    "causal_conv1d": [],
    "deepspeed": [],
    "flash_attn": [],
    "matplotlib": ["telemetry/load_picture.py"],
    "quack": ["ops/quack.py"],
    "xformers": [],
}
# Files that import a module whose name is not written in the call, and what it can be.
BY_ANOTHER_NAME = {
    "__init__.py": "modules of this package",
    "cli.py": "modules of this package",
    "commands/recipe_words.py": "modules of this package",
    "compat.py": "an installed package, for its version; torch, for grouped_mm",
    "dispatch/dispatcher.py": "modules of this package",
    "doctor/probes.py": "anything: the doctor tries it in a child process",
    "ops/table.py": "modules of this package",
}


def imported(tree: ast.Module) -> tuple[set[str], bool]:
    """Top-level names of what a file imports, also by a literal or constant name; whether it imports by another."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found, is_dynamic = set(), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Call) and _is_import(node.func):
            name = node.args[0] if node.args else node.keywords[0].value
            value = constants.get(name.id) if isinstance(name, ast.Name) else getattr(name, "value", None)
            is_dynamic |= not isinstance(value, str)
            found |= {value} if isinstance(value, str) else set()
    return {name.partition(".")[0] for name in found}, is_dynamic


def _is_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def logic(tree: ast.Module) -> list[str]:
    """Statements of a package's face other than docstring, imports, lists of names and a lazy ``__getattr__``."""
    return [ast.unparse(node).splitlines()[0] for node in tree.body if not _belongs_in_a_face(node)]


def _belongs_in_a_face(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__getattr__", "__dir__") and len(node.body) <= 4
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING" and all(isinstance(x, ast.ImportFrom) for x in node.body)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return isinstance(target, ast.Name) and target.id in ("__all__", "__version__", "_PUBLIC")
    return False


def names_twice(files: list[str]) -> list[str]:
    counts = Counter(Path(file).name for file in files if Path(file).name != "__init__.py")
    return sorted(name for name, count in counts.items() if count > 1)


@pytest.mark.parametrize("package", OWNERS)
def test_only_owners_import_an_optional_package(package: str):
    assert sorted(file for file, tree in SOURCES.items() if package in imported(tree)[0]) == OWNERS[package]


def test_every_optional_package_has_an_owner():
    assert OPTIONAL.keys() <= OWNERS.keys()


def test_imports_by_another_name_are_known():
    assert {file for file, tree in SOURCES.items() if imported(tree)[1]} == BY_ANOTHER_NAME.keys()


IMPORTS = {
    "import peft": ({"peft"}, False),
    "def f():\n    from peft.tuners import lora": ({"peft"}, False),
    "def f():\n    importlib.import_module('fla.ops')": ({"fla"}, False),
    "NAME = 'fla.ops'\ndef f():\n    import_module(NAME)": ({"fla"}, False),
    "def f():\n    __import__(name='quack')": ({"quack"}, False),
    "def f(name):\n    import_module(name)": (set(), True),
    "def f(name):\n    import_module(f'fla.{name}')": (set(), True),
}


@pytest.mark.parametrize("code", IMPORTS)
def test_imports_in_any_form_are_seen(code: str):
    assert imported(ast.parse(code)) == IMPORTS[code]


def test_import_linter_has_the_same_owners():
    config = configparser.ConfigParser()
    config.read(PACKAGE.parent / "setup.cfg", encoding="utf-8")
    contracts = {
        config[section]["forbidden_modules"].strip(): config[section]["ignore_imports"].split()[::3]
        for section in config.sections()
        if config[section].get("type") == "forbidden"
    }
    files = {package: [f"{m.replace('.', '/')}.py" for m in modules] for package, modules in contracts.items()}
    owned = {package: owners for package, owners in OWNERS.items() if owners}
    assert files == {package: [f"hf_fsdpturbo/{owner}" for owner in owners] for package, owners in owned.items()}


def test_no_two_files_have_one_name():
    assert names_twice(list(SOURCES)) == []
    assert names_twice(["a/auto.py", "b/auto.py", "a/__init__.py", "b/__init__.py"]) == ["auto.py"]


@pytest.mark.parametrize("file", SOURCES)
def test_a_file_stays_under_300_lines(file: str):
    """Split by idea, not by size: two ideas are what makes a file long."""
    assert len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) < 300


@pytest.mark.parametrize("face", [file for file in SOURCES if Path(file).name == "__init__.py"])
def test_a_face_holds_no_logic(face: str):
    assert logic(SOURCES[face]) == []


LOGIC = [
    "def read():\n    pass",
    "TABLE = {}",
    "for x in ():\n    pass",
    "if True:\n    import os",
    "class A:\n    pass",
]


@pytest.mark.parametrize("code", LOGIC)
def test_logic_in_a_face_is_seen(code: str):
    (found,) = logic(ast.parse(f"'A face.'\nimport os\n__all__ = []\n{code}"))
    assert code.startswith(found)
