"""A release whose weights are packed (MXFP4, FP8 with scales) is loaded as if it were stored in full.

headers    paired: a weight has its shape in full, its scales have none (quantised/packed_pairs.py)
model      built without Transformers' quantizer, which would leave packed layers or convert whole tensors
reading    every part that is asked for is made of its own codes and scales (quantised/block_scales.py)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_fsdpturbo.checkpoint.unused import Carried
from hf_fsdpturbo.loading.open_files import Headers, OpenFiles
from hf_fsdpturbo.quantised.block_scales import AT_ONCE, Packed
from hf_fsdpturbo.quantised.methods import dequantised_by
from hf_fsdpturbo.quantised.packed_weight import packed_weight
from hf_fsdpturbo.ranks import rank

GB = 1e9
_said: set[str] = set()
"""Releases of which this process has said what they become."""


@contextlib.contextmanager
def built_in_full() -> Iterator[None]:
    """While open, ``from_pretrained`` builds packed releases as if they were stored in full, and reads them so.

    The function of Transformers that chooses a quantizer is wrapped for the length of the context, in this process.
    What the config and the keywords say of the release was checked before.
    """
    from transformers import modeling_utils

    own = modeling_utils.get_hf_quantizer

    def choose(config: Any, quantization_config: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
        setting = None if dequantised_by(quantization_config) is not None else quantization_config
        if setting is None:
            for part in (config, config.get_text_config(decoder=True)):
                if getattr(part, "quantization_config", None) is not None:
                    del part.quantization_config
        return own(config, setting, device_map, *args, **kwargs)

    modeling_utils.get_hf_quantizer = choose
    try:
        yield
    finally:
        modeling_utils.get_hf_quantizer = own


def packed_of(headers: Headers) -> dict[str, Packed]:
    """Tensors that are stored as codes and scales, by the key that they have in full."""
    return OpenFiles("", headers).packed


def report_packed(path: str, model: nn.Module, headers: Headers) -> None:
    """Say once, on rank 0, what a packed release has become; of what stays in 4 bits the run's summary speaks.

    Args:
        path: of the release, as the user gave it.
        model: loaded.
        headers: of its files.
    """
    packed = {key: tensor for key, tensor in packed_of(headers).items() if packed_weight(model, key) is None}
    if not packed or path in _said or rank() != 0:
        return
    _said.add(path)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    before = sum(tensor.size for tensor in packed.values())
    after = sum(torch.Size(tensor.shape).numel() for tensor in packed.values()) * dtype.itemsize
    print(
        f"[hf_fsdpturbo] {path}: {len(packed)} packed tensors are dequantised while they load, each rank its own "
        f"part: {before / GB:,.3g} GB become {after / GB:,.3g} GB of {str(dtype).removeprefix('torch.')} in all. They "
        "are saved so, without quantization_config.",
        flush=True,
    )


@dataclass(frozen=True, slots=True)
class CarriedInFull(Carried):
    """A packed tensor that the model class does not use: exports carry it in full, as bfloat16."""

    folder: str
    packed: Packed

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """As of :class:`Carried`, some rows of dim 0 at a time."""
        rows, *others = self.shape
        step = max(AT_ONCE // max(torch.Size(others).numel(), 1), 1)
        entry = {"dtype": "F32", "shape": list(self.shape), "packed": self.packed}
        files = OpenFiles(self.folder, {self.packed.weight[0]: {self.name: entry}})
        with contextlib.closing(files):
            for row in range(0, rows, step):
                part = files[self.name].read((slice(row, min(row + step, rows)),), torch.bfloat16)
                yield row * (self.nbytes // rows), part.view(torch.uint8).numpy().tobytes()


def carried_in_full(tensors: list[Carried], folder: str, packed: dict[str, Packed]) -> list[Carried]:
    """What exports carry of a packed release: codes as their values, scales not at all.

    Args:
        tensors: what was found in the files of the keys that the model has no place for, and of their codes.
        folder: of the release.
        packed: those of them that are packed, by key.
    """
    codes = {tensor.weight[1]: (name, tensor) for name, tensor in packed.items()}
    found = []
    for tensor in tensors:
        if tensor.name not in codes:
            found.append(tensor)
            continue
        name, whole = codes[tensor.name]
        shape = whole.full_shape
        size = 2 * torch.Size(shape).numel()
        place = (tensor.path, tensor.start, tensor.identity)
        found.append(CarriedInFull(name, "BF16", shape, size, *place, folder, whole))
    return found
