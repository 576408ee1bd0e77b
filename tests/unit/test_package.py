"""The package as a whole: what importing it costs, that its public names exist, and house rules no linter knows."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hf_fsdpturbo"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# Children of the doctor import what may be broken in any way, and report it: the one place for a broad except.
BROAD_EXCEPT = {"doctor/probes.py": 1}
LATE = ("trl", "fla", "fsdp_turbo", "triton", "torch_npu", "torch", "transformers")


def modules_loaded_by(code: str) -> set[str]:
    """Which of LATE a fresh interpreter has loaded after running `code`."""
    probe = f"{code}\nimport sys\nprint(*(name for name in {LATE!r} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", probe], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120, check=True
    )
    return set(result.stdout.split())


def dotted_names(tree: ast.AST) -> set[str]:
    """Every `a.b` read in a file, and every `b` of `from a import b`, as "a.b"."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names if "." in alias.name)
    return names


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_import_is_lazy():
    assert modules_loaded_by("import hf_fsdpturbo") == set()


def test_the_lazy_import_check_sees_an_eager_import():
    assert modules_loaded_by("import hf_fsdpturbo, json, transformers") >= {"transformers"}


def test_configuration_loads_neither_kernels_nor_trl():
    loaded = modules_loaded_by("from hf_fsdpturbo import FSDPTurboParams")
    assert not loaded & {"trl", "fla", "fsdp_turbo", "torch_npu"}


def test_public_names_exist():
    import hf_fsdpturbo

    assert [name for name in hf_fsdpturbo.__all__ if not hasattr(hf_fsdpturbo, name)] == []
    with pytest.raises(AttributeError, match="FSDPTurboNothing"):
        _ = hf_fsdpturbo.FSDPTurboNothing


def test_version_is_the_one_of_the_packaging():
    import tomllib

    import hf_fsdpturbo

    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert hf_fsdpturbo.__version__ == project["version"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_house_rules(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "the first line of a file says its one idea"
    names = dotted_names(tree)
    if room(path) != "launch_config":
        assert not {"os.environ", "os.getenv"} & names, "the environment is read in launch_config only"
    if room(path) not in ("ops", "kernels"):
        assert not {"torch.cuda", "torch.npu"} & names, "torch.cuda and torch.npu are for ops/ and kernels/ only"
    broad = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")))
    ]
    allowed = BROAD_EXCEPT.get(path.relative_to(PACKAGE).as_posix(), 0)
    assert len(broad) <= allowed, f"except Exception on lines {broad}"


FORBIDDEN = ["import os\nos.environ['A']", "from os import environ", "torch.cuda.init()", "import torch.npu"]


@pytest.mark.parametrize("code", FORBIDDEN)
def test_the_house_rules_check_sees_forbidden_names(code: str):
    assert {"os.environ", "torch.cuda", "torch.npu"} & dotted_names(ast.parse(code))
