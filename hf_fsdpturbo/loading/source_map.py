"""Which tensor of a checkpoint goes into which parameter, by Transformers' own renaming and conversion rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_fsdpturbo.loading.conversions import Conversion, Shape
from hf_fsdpturbo.loading.heads import REPLACED_HEAD
from hf_fsdpturbo.ranks import rank


@dataclass
class SourceMap:
    """What one load makes of a checkpoint.

    Attributes:
        conversions: by (first) target.
        dtypes: first target -> what its sources are converted to before anything else, as Transformers does.
        shapes: of every source that is used.
        unused: keys that belong to no parameter of the model class.
    """

    conversions: dict[str, Conversion] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def sources_of(self, conversion: Conversion) -> dict[str, Shape]:
        """Shapes of one conversion's sources."""
        return {key: self.shapes[key] for key in conversion.keys}


def map_sources(found: SourceMap, model: nn.Module, sources: Mapping[str, Any], load_config: Any) -> None:
    """Give every source its target, in the order and by the rules of Transformers' loader.

    Args:
        found: filled.
        model: on meta, sharded or not.
        sources: key -> tensor or safetensors slice, nothing is read.
        load_config: Transformers' ``LoadStateDictConfig``; its ``weight_mapping`` notes which rules were used.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules: list[Any] = load_config.weight_mapping or []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    wanted, prefix = model.state_dict(), str(model.base_model_prefix)
    for key in sorted(sources, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], prefix, wanted)
        if name not in wanted:
            found.unused.append(key)
            continue
        conversion = found.conversions.get(name)
        if conversion is None:
            rule = by_pattern[pattern] if pattern is not None else None
            conversion = found.conversions[name] = Conversion(name, _targets(name, rule), deepcopy(rule))
            found.dtypes[name] = _dtype(name, wanted[name], load_config)
        elif conversion.converter is None:
            continue  # two keys of one name: the first one is loaded
        conversion.sources.setdefault(pattern or key, []).append(key)
        found.shapes[key] = shape_of(sources[key])


def shape_of(source: Any) -> Shape:
    """Shape of a tensor or of a safetensors slice."""
    return tuple(source.shape if isinstance(source, Tensor) else source.get_shape())


def _targets(name: str, rule: Any) -> tuple[str, ...]:
    """All targets of a rule whose first one is ``name``."""
    if rule is None:
        return (name,)
    first, *others = rule.target_patterns
    return (name, *(name.replace(first, other) for other in others))


def _dtype(name: str, target: Tensor, load_config: Any) -> torch.dtype:
    """What Transformers' loader converts the sources of a target to."""
    from transformers.core_model_loading import build_glob_alternation

    if load_config.dtype_plan:
        pattern, plan, _ = build_glob_alternation(list(load_config.dtype_plan))
        match = pattern.search(name)
        if match is not None and match.lastgroup is not None:
            return load_config.dtype_plan[plan[match.lastgroup]]
    return target.dtype


def report_unused(path: str, found: SourceMap, fresh_heads: Iterable[str]) -> None:
    """Say once, on rank 0, which tensors of a checkpoint the model class has no place for.

    Args:
        fresh_heads: task heads that take the place of the checkpoint's own head, which is then not named.
    """
    unused = [key for key in found.unused if not (fresh_heads and key.startswith(REPLACED_HEAD))]
    if unused and rank() == 0:
        names = ", ".join(f"{name} ({number})" for name, number in by_module(unused).items())
        print(
            f"[hf_fsdpturbo] {path} has {len(unused)} tensors that the model class does not use, neither trained nor "
            f"saved by this run: {names}.",
            flush=True,
        )


def by_module(keys: Iterable[str]) -> dict[str, int]:
    """Keys in few words: their names up to the first number, or the whole name -> how many there are."""
    counted: dict[str, int] = {}
    for key in keys:
        parts = key.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        name = key if number is None else ".".join(parts[: number + 1]) + ".*"
        counted[name] = counted.get(name, 0) + 1
    return counted
