"""Names of a recipe's arguments, read from sources: a misspelt one is refused before TRL is imported, which is slow.

The dataclasses of TRL and Transformers are parsed, not run. Where a class or one of its bases is not where this file
looks for it (another release), nothing is refused here: the parser itself comes after, and knows.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

_OWN = Path(__file__).parents[1]
_SOURCES = {
    "transformers": ("training_args.py",),
    "trl": (
        "trainer/base_config.py",
        "trainer/sft_config.py",
        "trainer/dpo_config.py",
        "trainer/reward_config.py",
        "trainer/model_config.py",
        "scripts/utils.py",
    ),
}
_CONFIGS = {"sft": "FSDPTurboSFTConfig", "dpo": "FSDPTurboDPOConfig", "reward": "FSDPTurboRewardConfig"}
_BESIDE = ("ScriptArguments", "ModelConfig", "DatasetMixtureConfig")
_PARSERS_OWN = {"config", "help"}


def unknown_names(recipe: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that no dataclass of the recipe has; none where the sources are not understood.

    Args:
        recipe: ``sft``, ``dpo`` or ``reward``.
        names: without dashes in front.
    """
    known = field_names(recipe)
    if known is None:
        return []
    return [name for name in names if not {name, name.replace("-", "_").removeprefix("no_")} & known]


def field_names(recipe: str) -> set[str] | None:
    """Fields of a recipe's dataclasses; None where a source or a class is not found."""
    try:
        classes = _classes(_sources())
        found = set(_PARSERS_OWN)
        for name in (_CONFIGS[recipe], *_BESIDE):
            found |= _fields(classes, name)
    except (OSError, LookupError, SyntaxError, ValueError, AttributeError):
        return None
    return found


def stock_names() -> set[str]:
    """Fields of ``transformers.TrainingArguments``.

    Raises:
        LookupError: it is not where this file looks for it.
    """
    return _fields(_classes(_of_package("transformers")), "TrainingArguments")


def _sources() -> Iterator[str]:
    for path in (_OWN / "trl_configs.py", *sorted((_OWN / "arguments").glob("*.py"))):
        yield path.read_text(encoding="utf-8")
    for package in _SOURCES:
        yield from _of_package(package)


def _of_package(package: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise LookupError(package)
    for file in _SOURCES[package]:
        yield (Path(spec.origin).parent / file).read_text(encoding="utf-8")


def _classes(sources: Iterable[str]) -> dict[str, ast.ClassDef]:
    nodes = (node for source in sources for node in ast.parse(source).body)
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _fields(classes: dict[str, ast.ClassDef], name: str) -> set[str]:
    """Annotated names of a class and its bases.

    Raises:
        LookupError: a class is not there.
    """
    node = classes[name]
    annotated = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
    found = {target.id for target in annotated if isinstance(target, ast.Name)}
    for base in node.bases:
        found |= _fields(classes, base.id if isinstance(base, ast.Name) else ast.unparse(base))
    return found
