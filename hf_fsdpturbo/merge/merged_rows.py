"""Rows of the merged parameters: base rows plus ``s B A``, summed in float32 and rounded once to the base's dtype.

What is in memory: the rows asked for (at most a chunk of the export, or one expert), the factors of one parameter, and
the whole update of a matrix: its rows alone would come out with other last bits than PEFT's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.merge.adapter_plan import Factors, Update
from hf_fsdpturbo.merge.base_weights import BaseWeights
from hf_fsdpturbo.merge.four_bit_base import FourBitBase
from hf_fsdpturbo.sharding.expert_lora import to_expert_first


class MergedRows:
    """A source of the Hub export, in one process.

    Args:
        tensors: on meta, by name in the model: what is to be written, in which dtype.
        base: the base's parameters.
        plan: what the adapter does to them.
        adapter: its file, open (``safe_open``).
    """

    def __init__(
        self, tensors: dict[str, Tensor], base: BaseWeights | FourBitBase, plan: dict[str, Update], adapter: Any
    ) -> None:
        self.tensors, self._base, self._plan, self._adapter = tensors, base, plan, adapter
        self._held: dict[str, Tensor] = {}  # whole parameters of the running conversion
        self._factors: dict[str, Tensor] = {}  # of the same, by key of the file
        self._matrices: dict[str, Tensor] = {}  # their updates, by key of A

    def begin(self, names: tuple[str, ...]) -> None:
        """Keep nothing of other parameters than these."""
        self._held = {name: tensor for name, tensor in self._held.items() if name in names}
        keys = {key for name in names for f in self._plan.get(name, Update()).factors for key in (f.a, f.b)}
        self._factors = {key: tensor for key, tensor in self._factors.items() if key in keys}
        self._matrices = {key: tensor for key, tensor in self._matrices.items() if key in keys}

    def rows(self, name: str, start: int, stop: int, writer: int) -> Tensor | None:
        """Rows ``[start, stop)``, merged."""
        update, dtype = self._plan.get(name, Update()), self.tensors[name].dtype
        rows = self._unmerged(name, update, start, stop)
        if update.factors:
            total = rows.to(torch.promote_types(rows.dtype, torch.float32))
            for factors in update.factors:
                total = total + self._delta(factors, start, stop, self.tensors[name].shape[0])
            rows = total
        return rows.to(dtype)

    def owner_of_rows(self, name: str, start: int, stop: int) -> list[int]:
        """The one process there is."""
        return [0]

    def sharers_of_rows(self, name: str, start: int, stop: int) -> list[int]:
        """The one process there is."""
        return [0]

    def _unmerged(self, name: str, update: Update, start: int, stop: int) -> Tensor:
        if update.whole is not None:
            part = self._adapter.get_slice(update.whole)
            return part[start:stop] if part.get_shape() else self._adapter.get_tensor(update.whole)
        if self._base.is_cut(name):
            return self._base.rows(name, start, stop)
        if name not in self._held:
            self._held[name] = self._base.whole(name)
        return self._held[name][start:stop] if self._held[name].ndim else self._held[name]

    def _factor(self, key: str) -> Tensor:
        if key not in self._factors:
            self._factors[key] = self._adapter.get_tensor(key).float()
        return self._factors[key]

    def _delta(self, factors: Factors, start: int, stop: int, num_rows: int) -> Tensor:
        """Rows of ``s B A``, float32; layouts in ``adapter_plan.py``."""
        if factors.kind != "stacked":
            return self._matrix(factors)[start:stop]
        a, b = self._factor(factors.a), self._factor(factors.b)
        a = to_expert_first("lora_A", a, num_rows)[start:stop]
        b = to_expert_first("lora_B", b, num_rows)[start:stop]
        delta = torch.bmm(b, a) * factors.scaling
        return delta.transpose(1, 2) if factors.is_transposed else delta

    def _matrix(self, factors: Factors) -> Tensor:
        """The whole update of a matrix."""
        if factors.a not in self._matrices:
            made = self._factor(factors.b) @ self._factor(factors.a)
            is_flipped = factors.kind == "embedding" or factors.is_transposed
            self._matrices[factors.a] = (made.T if is_flipped else made) * factors.scaling
        return self._matrices[factors.a]
