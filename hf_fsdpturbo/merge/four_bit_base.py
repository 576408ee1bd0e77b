"""The base as a QLoRA run has trained on it: the weights that it quantises, as 4 bits leave them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.merge.base_weights import BaseWeights
from hf_fsdpturbo.parallelize.quantise import choose_weights
from hf_fsdpturbo.quantised.asked import FourBit
from hf_fsdpturbo.quantised.filling import Filling
from hf_fsdpturbo.quantised.four_bit import BLOCK, nest, pack, unnest, unpack_

AT_ONCE = 2**20
"""Elements in float32 at a time."""


def chosen(model: Any, asked: FourBit) -> frozenset[str]:
    """Names of the weights that a run quantises, by the run's own choice.

    Args:
        model: on meta, without adapters.
        asked: what was asked for.

    Raises:
        ValueError: a row is not whole blocks, or nothing is left to quantise; names layer, rule, fix.
    """
    filling = Filling(asked, torch.device("cpu"))
    choose_weights(model, filling)
    return frozenset(filling.choice)


class FourBitBase:
    """A base's parameters, of which the chosen ones went to 4 bits and back; otherwise as :class:`BaseWeights`.

    A value is rounded to the files' dtype, as a run rounds it that stores weights in it.

    Args:
        base: as it was released.
        names: of :func:`chosen`.
        asked: what was asked for.
    """

    def __init__(self, base: BaseWeights, names: frozenset[str], asked: FourBit) -> None:
        self._base, self._names, self._asked = base, names, asked

    def is_cut(self, name: str) -> bool:
        """As of the base; but double quantisation takes the mean of a whole matrix, which has no parts."""
        is_matrix = name in self._names and len(self._base.shape(name)) == 2
        return self._base.is_cut(name) and not (self._asked.nested and is_matrix)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a parameter, on the CPU; only where :meth:`is_cut`."""
        return self._there_and_back(name, self._base.rows(name, start, stop))

    def whole(self, name: str) -> Tensor:
        """A whole parameter, on the CPU."""
        return self._there_and_back(name, self._base.whole(name))

    def _there_and_back(self, name: str, weight: Tensor) -> Tensor:
        return through_four_bits(weight, self._asked) if name in self._names else weight


def through_four_bits(weight: Tensor, asked: FourBit) -> Tensor:
    """What 4 bits leave of a matrix, or of each matrix of a stack.

    Args:
        weight: ``[..., O, 64 B]``, contiguous or not; without ``asked.nested`` any rows of it.
        asked: how it is quantised.

    Returns:
        the values, in the weight's dtype.
    """
    out = torch.empty(weight.shape, dtype=weight.dtype)
    flat, filled = weight.contiguous().view(-1, BLOCK), out.view(-1, BLOCK)
    step = AT_ONCE // BLOCK
    packed = [pack(part, asked.quant_type) for part in flat.split(step)]
    largest = torch.cat([scale for _, scale in packed])
    if asked.nested and len(largest):
        per_matrix = largest.view(-1, weight.shape[-2] * weight.shape[-1] // BLOCK)
        largest = unnest(*nest(per_matrix), per_matrix.shape[1]).reshape(largest.shape)
    for (codes, _), scale, values in zip(packed, largest.split(step), filled.split(step), strict=True):
        unpack_(values, codes, scale, asked.quant_type)
    return out
