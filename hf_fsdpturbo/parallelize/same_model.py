"""A model object must be the same on every rank: each keeps its slices, and slices of different models fit nowhere."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hf_fsdpturbo.ranks import everyone

ROUNDING = 1e-9  # of norm * sqrt(numel), which bounds a sum: machines add up float64 in another order

Facts = tuple[tuple[int, ...], float, float]  # shape, sum, norm


def check_same_model(model: nn.Module) -> None:
    """Compare two numbers of each parameter and buffer over all ranks; tensors on meta are left out. Collective.

    Raises:
        ValueError: on every rank, naming the first tensor that differs, the ranks, and the fix.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    mine = {name: _facts(tensor.detach()) for name, tensor in tensors if tensor.device.type != "meta"}
    theirs: list[dict[str, Facts]] = everyone(mine)
    first = theirs[0]
    for name in dict.fromkeys(name for facts in theirs for name in facts):
        differing = [rank for rank, facts in enumerate(theirs) if not _alike(first.get(name), facts.get(name))]
        if differing:
            raise ValueError(
                f"model is another object on rank {', '.join(map(str, differing[:8]))} than on rank 0: {name} differs."
                " Build it under the same seed on all ranks (transformers.set_seed before it), or pass its path."
            )


def _facts(tensor: Tensor) -> Facts:
    shape = tuple(tensor.shape)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    values = tensor if tensor.is_floating_point() else tensor.double()
    norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    return shape, float(tensor.sum(dtype=torch.float64)), float(norm)


def _alike(one: Facts | None, other: Facts | None) -> bool:
    if one is None or other is None or one[0] != other[0]:
        return False
    slack = ROUNDING * one[2] * math.sqrt(math.prod(one[0]))
    return all(a == b or abs(a - b) <= slack or a != a and b != b for a, b in zip(one[1:], other[1:], strict=True))
