"""The base's files as parameters of its model: some rows at a time, in the files' dtype, by Transformers' rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.loading.conversions import Conversion, free_dims
from hf_fsdpturbo.loading.headers import check_sources
from hf_fsdpturbo.loading.open_files import Headers, OpenFiles
from hf_fsdpturbo.loading.source_map import SourceMap, map_sources
from hf_fsdpturbo.loading.whole_sources import Target, convert, reader

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


class BaseWeights:
    """A checkpoint's tensors by their names in the model.

    Args:
        model: on meta; from now on it is exported under the names that these files have.
        folder: of the files.
        headers: of all of them.
        without: parameters that are not read.

    Attributes:
        unknown: keys that the model class has no place for.

    Raises:
        ValueError: a tensor of another shape or an incomplete set of experts; names file and key.
    """

    def __init__(self, model: Any, folder: str, headers: Headers, without: set[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        rules = get_model_conversion_mapping(model)
        self.model, self.files, self._found = model, OpenFiles(folder, headers), SourceMap()
        map_sources(self._found, model, self.files, SimpleNamespace(weight_mapping=rules, dtype_plan=None))
        self.unknown = self._found.unknown
        self._in_full = getattr(model.config.get_text_config(), "dtype", None) or torch.bfloat16
        self._found.conversions = {n: c for n, c in self._found.conversions.items() if n not in without}
        check_sources(self._found, model, folder, headers)
        model._weight_conversions = [rule for rule in rules if rule.was_used()]
        self._conversion = {name: c for c in self._found.conversions.values() for name in c.targets}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def __contains__(self, name: str) -> bool:
        return name in self._conversion

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a parameter: that of its tensors in the files, the widest where they differ.

        Of packed tensors the one that the config says, which they are loaded and trained in; bfloat16 if it says none.

        Raises:
            ValueError: codes that the config says nothing of.
        """
        found, *others = (self._stored(key) for key in self._conversion[name].keys)
        for dtype in others:
            found = torch.promote_types(found, dtype)
        return found

    def _stored(self, key: str) -> torch.dtype:
        tensor = self.files[key]
        if tensor.packed is not None:
            return self._in_full
        if tensor.get_dtype() not in DTYPES:
            raise ValueError(
                f"{self.files.path(key)}: {key} has dtype {tensor.get_dtype()}, which has no values of its own: "
                "config.json does not say how it is packed. Use the release's own files and config.json."
            )
        return DTYPES[tensor.get_dtype()]

    def all_dtypes(self) -> dict[str, torch.dtype]:
        """:meth:`dtype` of every parameter that is read."""
        return {name: self.dtype(name) for name in self._conversion}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter in the model."""
        return self._shapes[name]

    def is_cut(self, name: str) -> bool:
        """Whether rows are made of parts of the files; else of whole ones."""
        conversion = self._conversion[name]
        return bool(self._shapes[name]) and 0 in free_dims(
            conversion, self._found.sources_of(conversion), self._targets(conversion)
        )

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a parameter, on the CPU; only where :meth:`is_cut`."""
        return self._made(name, {0: (start, stop)})

    def whole(self, name: str) -> Tensor:
        """A whole parameter, on the CPU."""
        return self._made(name, {})

    def _targets(self, conversion: Conversion) -> dict[str, tuple[int, ...]]:
        return {name: self._shapes[name] for name in conversion.targets if name in self._shapes}

    def _made(self, name: str, region: dict[int, tuple[int, int]]) -> Tensor:
        conversion, dtype = self._conversion[name], self.dtype(name)
        wanted = {target: Target(shape, dtype) for target, shape in self._targets(conversion).items()}
        sources = self._found.sources_of(conversion)
        return convert(self.model, conversion, sources, wanted, reader(self.files, dtype), region)[name]
