"""One stack of experts that stays as its release packs it (MXFP4): never in full, and rounded nowhere.

E experts, R rows, C columns as they are packed. What the model has as ``name [E, C, R]`` is

    name          uint8 [E, R, C/32, 16]   codes; a frozen parameter that FSDP shards and gathers as bytes
    name_e8m0     uint8 [E, R, C/32]       scales; sharded alike

Experts are cut over ep, and over efsdp too where it divides them; else rows are, which are whole groups of numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hf_fsdpturbo.quantised.block_scales import GROUP
from hf_fsdpturbo.quantised.mxfp4 import BYTES, unpack_
from hf_fsdpturbo.quantised.packed_weight import EXPONENTS, PackedWeight, frozen, packed_weights
from hf_fsdpturbo.shards import like, local_box, local_tensor

Index = tuple[slice, ...]


def plain_dtype(module: nn.Module, name: str) -> torch.dtype:
    """Dtype that a module's weight has in plain Transformers, which would have a packed stack in full."""
    kept = packed_weights(module).get(name)
    return kept.dtype if isinstance(kept, ReleasedWeight) else module.get_parameter(name).dtype


class ReleasedWeight(PackedWeight):
    """As the base class, of a stack ``[E, C, R]`` of ``module`` that is on meta; its bytes come by :meth:`fill_bytes`.

    Args:
        module: it belongs to.
        name: there.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._take_place(module, name, EXPONENTS)
        experts, columns, rows = self.shape
        grid = (experts, rows, columns // GROUP)
        module._parameters[name] = frozen(torch.empty((*grid, BYTES), dtype=torch.uint8, device="meta"))
        module._parameters[self.largest_name] = frozen(torch.empty(grid, dtype=torch.uint8, device="meta"))

    def _shape_of(self, packed: Tensor) -> tuple[int, ...]:
        experts, rows, groups, _ = packed.shape
        return experts, groups * GROUP, rows

    def _places(self, packed: DTensor) -> Any:
        swapped = {1: Shard(2), 2: Shard(1)}
        return [swapped.get(getattr(place, "dim", 0), place) for place in packed.placements]

    def parts(self) -> tuple[Index, Index]:
        """This rank's part of the codes and of the scales, while both wait for their bytes."""
        assert self._packed is not None
        assert self._statistic is not None
        return local_box(self._packed).slices, local_box(self._statistic).slices

    def fill_bytes(self, codes: Tensor, scales: Tensor) -> None:
        """Take this rank's part of the codes and of the scales."""
        assert self._packed is not None
        assert self._statistic is not None
        self.module._parameters[self.name] = frozen(like(self._packed, codes))
        self._statistic = frozen(like(self._statistic, scales))

    def _own_exponents(self) -> Tensor:
        found = self.module._parameters.get(self.largest_name, self._statistic)
        assert found is not None
        return local_tensor(found)

    def _unpack_(self, out: Tensor, packed: Tensor) -> None:
        unpack_(out, packed, self._own_exponents())

    def is_near(self, expected: Tensor, index: Index) -> bool:
        """Whether values at ``index`` of this rank's part are those of ``expected``, bit for bit."""
        experts, columns, rows = (range(size)[part] for part, size in zip(index, self.local_shape(), strict=True))
        groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
        at = slice(experts.start, experts.stop), slice(rows.start, rows.stop), groups
        codes, scales = local_tensor(self._parameter())[at].cpu(), self._own_exponents()[at].cpu()
        found = torch.empty(self._shape_of(codes), dtype=expected.dtype)
        unpack_(found, codes, scales)
        first = columns.start - groups.start * GROUP
        return torch.equal(found[:, first : first + len(columns)], expected)
