"""Which tensor of a checkpoint goes into which parameter, by Transformers' own renaming and conversion rules."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_fsdpturbo.loading.conversions import Conversion, Shape


@dataclass
class SourceMap:
    """What one load makes of a checkpoint.

    Attributes:
        conversions: by (first) target.
        dtypes: first target -> what its sources are converted to before anything else, as Transformers does.
        shapes: of every source that is used.
        unknown: keys that belong to no parameter or buffer of the model.
    """

    conversions: dict[str, Conversion] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

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
            found.unknown.append(key)
        if not isinstance(wanted.get(name), Tensor):
            continue  # the class has no place for it, or it is a module's extra state
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
