"""Headers of a safetensors checkpoint against the model that will be read from it: shapes, and no expert left out.

Transformers stacks per-expert tensors in the order in which it meets them: with one expert missing, the next one takes
its place, and a rank that holds no expert from the end of the list notices nothing. So the headers are checked first.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from hf_fsdpturbo.loading.config_values import check_dtypes
from hf_fsdpturbo.loading.expert_numbers import check_expert_numbers
from hf_fsdpturbo.loading.open_files import Headers, OpenFiles
from hf_fsdpturbo.loading.source_map import SourceMap, map_sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Source:
    """One tensor of the checkpoint."""

    file: str
    key: str
    shape: tuple[int, ...]


def check_headers(model: PreTrainedModel, directory: str, headers: Headers) -> list[str]:
    """Compare what the files hold with what a (meta) model needs, by Transformers' own renaming and conversion.

    Args:
        model: built, sharded or not.
        directory: of the checkpoint, for the messages.
        headers: of all its files.

    Returns:
        keys that belong to no parameter or buffer of the model.

    Raises:
        ValueError: as :func:`check_sources`.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    found = SourceMap()
    rules = SimpleNamespace(weight_mapping=get_model_conversion_mapping(model), dtype_plan=None)
    map_sources(found, model, OpenFiles(directory, headers), rules)
    check_sources(found, model, directory, headers)
    return found.unknown


def check_sources(found: SourceMap, model: nn.Module, directory: str, headers: Headers) -> None:
    """Compare the shapes of what the files hold with those of what is made of them.

    Keys that the model does not know, and parameters that no key belongs to, are left to the loader's report: it knows
    what may be missing.

    Args:
        found: which source goes where.
        model: built, sharded or not.
        directory: of the checkpoint, for the messages.
        headers: of all its files.

    Raises:
        ValueError: a tensor of another shape, or an incomplete set of per-expert tensors; names file and key.
    """
    files = {key: file for file, header in headers.items() for key in header}
    used = {key for conversion in found.conversions.values() for keys in conversion.sources.values() for key in keys}
    check_dtypes(directory, cast(Any, model).config.to_dict(), headers, used)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    for name, conversion in found.conversions.items():
        sources = {
            pattern: [_Source(os.path.join(directory, files[key]), key, found.shapes[key]) for key in keys]
            for pattern, keys in conversion.sources.items()
        }
        if conversion.converter is None:
            for group in sources.values():
                _check_shape(group[0], name, wanted[name])
        else:
            _check_stack(name, wanted[name], sources, conversion.converter)


def _check_shape(source: _Source, name: str, wanted: tuple[int, ...]) -> None:
    if source.shape != wanted:
        raise ValueError(
            f"{source.file}: {source.key} has shape {source.shape}, but {name} of the model has {wanted}. Use the "
            "model's own checkpoint and config."
        )


def _check_stack(name: str, wanted: tuple[int, ...], sources: dict[str, list[_Source]], converter: Any) -> None:
    """Tensors that are stacked and joined into one parameter: as many of each kind, together as large as it is."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    if len(converter.target_patterns) > 1 or not all(
        isinstance(step, (Concatenate, MergeModulelist)) for step in converter.operations
    ):
        _check_numbers(name, sources, converter)
        return  # split, transposed or permuted on the way: sizes are the loader's business
    fullest = max(sources.values(), key=len)
    for pattern in converter.source_patterns:
        present = sources.get(pattern, [])
        if len(present) < len(fullest):
            raise ValueError(_missing(name, pattern, present, fullest, sources))
    for group in sources.values():
        usual = Counter(source.shape for source in group).most_common(1)[0][0]
        for source in group:
            if source.shape != usual:
                raise ValueError(
                    f"{source.file}: {source.key} has shape {source.shape}, but its neighbours, from which {name} is "
                    f"made too, have {usual}. Copy the checkpoint again."
                )
    held = sum(math.prod(source.shape) for group in sources.values() for source in group)
    if held != math.prod(wanted):
        first, others = fullest[0], sum(map(len, sources.values())) - 1
        raise ValueError(
            f"{first.file}: {first.key} and {others} more hold {held} elements, but {name} {wanted} of the model has "
            f"{math.prod(wanted)}. An expert is missing, or the config is another model's."
        )
    _check_numbers(name, sources, converter)
    _check_stacked_shape(name, wanted, list(sources.values()), converter)


def _check_numbers(name: str, sources: dict[str, list[_Source]], converter: Any) -> None:
    from transformers.core_model_loading import MergeModulelist

    if any(isinstance(step, MergeModulelist) for step in converter.operations):
        for pattern, group in sources.items():
            check_expert_numbers(name, pattern, [(source.file, source.key) for source in group])


def _check_stacked_shape(name: str, wanted: tuple[int, ...], groups: list[list[_Source]], converter: Any) -> None:
    """As many elements, but in other dims: matrices that lie transposed. Only where what is stacked is then joined."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    merge, *join = converter.operations
    if not isinstance(merge, MergeModulelist) or merge.dim != 0 or len(join) != len(groups[1:2]):
        return
    made = [len(groups[0]), *groups[0][0].shape]
    for step in join:
        if not isinstance(step, Concatenate):
            return
        made[step.dim] = sum((len(group), *group[0].shape)[step.dim] for group in groups)
    if tuple(made) != wanted:
        source = groups[0][0]
        raise ValueError(
            f"{source.file}: {source.key} has shape {source.shape}, of which {name} would be {tuple(made)}, but the "
            f"model has {wanted}. Use the model's own checkpoint and config."
        )



def _missing(
    name: str, pattern: str, present: list[_Source], fullest: list[_Source], sources: dict[str, list[_Source]]
) -> str:
    """Say which key is not there, judged by its neighbours of another kind."""
    full_pattern = next(p for p, group in sources.items() if group is fullest)
    tail, own_tail = full_pattern.rpartition("*")[2].rstrip("$"), pattern.rpartition("*")[2].rstrip("$")
    there = {source.key for source in present}
    expected = [source.key.removesuffix(tail) + own_tail for source in fullest]
    lacking = [key for key in expected if key not in there] or [f"one of {pattern}"]
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    directory = os.path.dirname(fullest[0].file)
    return f"{directory} lacks {lacking[0]}{more}, from which {name} is made. Copy the whole checkpoint."
