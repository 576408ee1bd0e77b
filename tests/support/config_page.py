"""``docs/config.md``: every field with its default and an example, written from the dataclasses themselves.

    python -m tests.support.config_page        writes the page

``tests/unit/test_config_page.py`` compares page and dataclasses, and parses every example as a run does.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hf_fsdpturbo.arguments.params import CHUNK_SIZES, FLA_OPERATOR_NAMES, KERNEL_NAMES, InitParams, KernelParams
from hf_fsdpturbo.arguments.params import FSDPTurboParams as Dist
from hf_fsdpturbo.arguments.sources import CHOICES, PUBLIC_DEFAULTS
from hf_fsdpturbo.arguments.turbo_arguments import FSDPTurboArguments

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
GROUPS: dict[str, type] = {"dist_config": Dist, "kernel_config": KernelParams, "init_config": InitParams}
# Values for fields whose type does not say one; all others are made from choices and types.
EXAMPLES: dict[str, Any] = {
    "dist_config": {"ep_size": 2, "efsdp_size": 1},
    "kernel_config": {"name": "auto, flash-linear-attention", "chunk_size": 64},
    "init_config": {"name": "init_on_rank0"},
    "cp_mode": "ulysses",
    "ep_size": 2,
    "ep_dispatcher": "fused",
    "dist_config.dcp_path": "outputs/checkpoint-100/dcp",
    "dist_config.fsdp_ignored_modules": ["model.layers.{*}.mlp.gate"],
    "dist_config.hook_modules": ["model.layers.{*}.mlp"],
    "dist_config.ep_dispatcher": "fused",
    "kernel_config.name": "auto, liger",
    "kernel_config.include_kernels": FLA_OPERATOR_NAMES[0],
}
INTRODUCTION = """# Settings

<!-- Written by `python -m tests.support.config_page`; tests/unit/test_config_page.py compares. -->

Every setting that hf_fsdpturbo adds to `TrainingArguments`, `SFTConfig`, `DPOConfig` and `RewardConfig` (as
`FSDPTurboSFTConfig` and so on). Each can be given in four places; the first that speaks wins, and the start-up lines
say which it was:

| place | how | example |
|---|---|---|
| command line | `--name value` | `--ep_size 8` |
| Python | `name=value` | `FSDPTurboSFTConfig(ep_size=8)` |
| environment | `FSDPTURBO_NAME` | `FSDPTURBO_EP_SIZE=8` |
| accelerate YAML, in the block `fsdp_config` | `fsdp_turbo_name: value` | `fsdp_turbo_ep_size: 8` |

Command line and Python are one place; a recipe's `--config` YAML belongs to it too. Mappings (`dist_config`,
`kernel_config`, `init_config`) are a YAML block, a dict, JSON text, or the path of a YAML or JSON file. A name nobody
knows is an error.
"""


def rows_of(cls: type) -> list[tuple[str, Any, Any, str]]:
    """``(name, type, default, help)`` of a dataclass's own fields, help from metadata or from its docstring."""
    hints = get_type_hints(cls)
    texts = attributes(cls)
    found = []
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = dataclasses.MISSING
        found.append((field.name, hints[field.name], default, field.metadata.get("help") or texts[field.name]))
    return found


def attributes(cls: type) -> dict[str, str]:
    """The ``Attributes:`` section of a docstring."""
    text = inspect.getdoc(cls) or ""
    _, _, section = text.partition("Attributes:\n")
    section = section.split("\n\n")[0]
    found: dict[str, str] = {}
    for name, first, rest in re.findall(r"^    (\w+): (.*)\n?((?:        .*\n?)*)", section, re.MULTILINE):
        found[name] = " ".join([first, *rest.split()]).replace("``", "`").strip()
    return {name: re.sub(r":data:`(\w+)`", r"\1", words) for name, words in found.items()}


def public_rows() -> list[tuple[str, Any, Any, str]]:
    """Of the public fields, with the defaults in force."""
    own = [row for row in rows_of(FSDPTurboArguments) if row[0] in PUBLIC_DEFAULTS]
    return [(name, kind, PUBLIC_DEFAULTS[name], words) for name, kind, _, words in own]


def kind_words(name: str, kind: Any) -> str:
    """A type as a person writes it: choices, or a plain name."""
    if name in CHOICES:
        return " \\| ".join(f"`{choice}`" for choice in CHOICES[name])
    if name == "kernel_config.name":
        return "comma list of " + ", ".join(f"`{kernel}`" for kernel in KERNEL_NAMES)
    if name == "kernel_config.include_kernels":
        return "comma list of " + ", ".join(f"`{operator}`" for operator in FLA_OPERATOR_NAMES)
    if name == "kernel_config.chunk_size":
        return " \\| ".join(f"`{size}`" for size in CHUNK_SIZES)
    if get_origin(kind) is Literal:
        return " \\| ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        kinds = [kind_words("", part) for part in get_args(kind) if part is not NoneType and part is not str]
        return kinds[0] if kinds else "text"
    if get_origin(kind) is list:
        return "list"
    return {bool: "true or false", int: "integer", str: "text", float: "number", dict: "mapping"}.get(kind, str(kind))


def example_of(name: str, kind: Any, default: Any) -> Any:
    """A value that the field takes: one that is not its default where there is another."""
    if name in EXAMPLES:
        return EXAMPLES[name]
    choices = CHOICES.get(name) or (get_args(kind) if get_origin(kind) is Literal else ())
    if name == "kernel_config.chunk_size":
        choices = CHUNK_SIZES
    if choices:
        return next((choice for choice in choices if choice != default), choices[0])
    kinds = set(get_args(kind)) - {NoneType} if get_origin(kind) in (Union, UnionType) else {kind}
    if bool in kinds:
        return not default
    if int in kinds:
        return 600 if "timeout" in name else 1
    if float in kinds:
        return 0.5
    raise KeyError(f"{name}: add a value to EXAMPLES")


def written(value: Any) -> str:
    """A value as YAML and the command line take it."""
    if value is dataclasses.MISSING:
        return "(must be given)"
    if value is None:
        return "left out"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{json.dumps(value) if isinstance(value, dict | list) else value}`"


def all_rows() -> list[tuple[str, str, Any, Any, str, Any]]:
    """``(section, name, type, default, help, example)`` of every field; names of groups are ``group.field``."""
    found = [("", n, k, d, w, example_of(n, k, d)) for n, k, d, w in public_rows()]
    for group, cls in GROUPS.items():
        found += [
            (group, n, k, d, w, example_of(f"{group}.{n}", k, d)) for n, k, d, w in rows_of(cls)
        ]  # fmt: skip
    return found


def render() -> str:
    """The page."""
    lines = [INTRODUCTION]
    heads = {
        "": "## Fields",
        "dist_config": "## `dist_config`\n\nHow experts and layers are sharded.",
        "kernel_config": "## `kernel_config`\n\nWhich kernels a model runs: [kernels](kernels.md).",
        "init_config": "## `init_config`\n\nWho reads the weights.",
    }
    section = None
    for group, name, kind, default, words, example in all_rows():
        if group != section:
            section = group
            lines += ["", heads[group], "", "| name | values | default | what | example |", "|---|---|---|---|---|"]
        full = f"{group}.{name}" if group else name
        cells = [f"`{name}`", kind_words(full, kind), written(default), words.replace("|", "\\|"), written(example)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
