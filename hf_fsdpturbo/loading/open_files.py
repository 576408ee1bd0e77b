"""Safetensors files that are opened by who needs a part of them, once: shapes come from the headers.

Transformers opens every file on every rank, and asks for every tensor; a rank needs the files of its own slices.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.quantised.block_scales import Packed, in_full

Headers = dict[str, dict[str, Any]]
"""File name -> key -> ``{"shape": [...], ...}``, as safetensors writes it; with ``"packed"``: codes and scales, which
are read as if they were stored in full."""


class OpenFiles(Mapping[str, Any]):
    """Slices of a checkpoint by key; a file stays open until :meth:`close`.

    Args:
        folder: of the files.
        headers: of all of them.

    Attributes:
        used: whether Transformers took its tensors from here.
    """

    def __init__(self, folder: str, headers: Headers) -> None:
        self._folder, self._headers, self.used = folder, headers, False
        self._files = {key: file for file, header in headers.items() for key in header}
        self._open: dict[str, Any] = {}
        self._stack, self._lock = contextlib.ExitStack(), threading.Lock()

    def close(self) -> None:
        """Close all files."""
        self._open.clear()
        self._stack.close()

    def are(self, paths: Iterable[str]) -> bool:
        """Whether these are the files that Transformers would read: an adapter's base lies elsewhere."""
        own = {os.path.realpath(os.path.join(self._folder, file)) for file in self._headers}
        return own == {os.path.realpath(path) for path in paths}

    def path(self, key: str) -> str:
        """File of a tensor."""
        return os.path.join(self._folder, self._files[key])

    @property
    def packed(self) -> dict[str, Packed]:
        """Tensors that are codes and scales, by key."""
        entries = ((key, entry.get("packed")) for header in self._headers.values() for key, entry in header.items())
        return {key: packed for key, packed in entries if packed is not None}

    def read(self, file: str, key: str, index: Any) -> Tensor:
        """A part of a tensor as it is stored; threads may ask at once.

        Raises:
            ValueError: the file is missing or damaged here; another rank of this machine has read its header.
        """
        from safetensors import SafetensorError, safe_open

        from hf_fsdpturbo.loading.files import safetensors_header

        path = os.path.join(self._folder, file)
        with self._lock:
            if path not in self._open:
                try:
                    self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError):
                    safetensors_header(path)  # says what is wrong with the file
                    raise
        tensor: Tensor = self._open[path].get_slice(key)[index if index else ...]
        return tensor

    def __getitem__(self, key: str) -> Slice:
        file = self._files[key]
        return Slice(self, file, key, self._headers[file][key])

    def __contains__(self, key: object) -> bool:
        return key in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class Slice:
    """A tensor of a file that is not open yet, as safetensors shows one: shape, dtype, parts by index."""

    __slots__ = ("_entry", "_file", "_files", "_key")

    def __init__(self, files: OpenFiles, file: str, key: str, entry: Mapping[str, Any]) -> None:
        self._files, self._file, self._key, self._entry = files, file, key, entry

    @property
    def packed(self) -> Packed | None:
        """Codes and scales, of a tensor that is stored as these."""
        return self._entry.get("packed")

    def get_shape(self) -> list[int]:
        """Shape of the whole."""
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        """Dtype as the file names it."""
        return str(self._entry["dtype"])

    def __getitem__(self, index: Any) -> Tensor:
        return self.read(index, torch.float32)

    def read(self, index: Any, dtype: torch.dtype) -> Tensor:
        """A part; of codes and scales in that dtype, else as it is stored."""
        if self.packed is None:
            return self._files.read(self._file, self._key, index)
        parts = index if isinstance(index, tuple) else () if index is ... else (index,)
        return in_full(self.packed, self._files.read, parts, dtype)

    def as_stored(self, codes: tuple[slice, ...], scales: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """A part of the codes and one of the scales, as they lie packed."""
        assert self.packed is not None
        return self._files.read(*self.packed.weight, codes), self._files.read(*self.packed.scale, scales)


def any_packed(sources: Mapping[str, Any], keys: Iterable[str]) -> bool:
    """Whether one of these tensors is stored as codes and scales."""
    found = (sources[key] for key in keys)
    return any(isinstance(source, Slice) and source.packed is not None for source in found)


def _check_here(paths: list[str]) -> None:
    """Headers of files that are read elsewhere than where another rank of this machine has looked."""
    from hf_fsdpturbo.loading.files import safetensors_header

    for path in paths:
        safetensors_header(path)


@contextlib.contextmanager
def opened_on_demand(files: Callable[[], OpenFiles | None]) -> Iterator[None]:
    """While open, ``from_pretrained`` takes its tensors from there instead of opening every file.

    The static method of Transformers that opens them is wrapped for the length of the context, in this process.

    Args:
        files: asked when loading begins; None leaves it to Transformers (other formats).
    """
    from transformers import PreTrainedModel

    own = PreTrainedModel.__dict__["_load_pretrained_model"]

    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        found = files() if state_dict is None and load_config.hf_quantizer is None else None
        if found is not None and found.are(checkpoint_files or []):
            found.used, state_dict = True, dict(found.items())
        elif found is not None:
            _check_here([path for path in checkpoint_files or [] if path.endswith(".safetensors")])
        return own.__func__(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    PreTrainedModel._load_pretrained_model = staticmethod(load)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = own  # type: ignore[method-assign]
