"""Random weights that show faults: no two parts alike, nothing at a constant start, decay rates that remember."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HALF_ULP = 2.0**-24


def random_weights(make: Any, seed: int = 0) -> Any:
    """The model that ``make()`` builds, seeded, in float32, with :func:`tell_apart` on all that it saves."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().float()
        tell_apart(model)
    return model


def tell_apart(model: Any) -> None:
    """Move whatever starts constant off its start, so that a wrong or permuted one is seen; in place.

    What starts at zero in norms is moved by 0.5, and the decay rates of linear attention are made slow: near zero and
    near one relative distances say little.
    """
    saved = model.state_dict(keep_vars=True)
    buffers = [(n, b) for n, b in model.named_buffers() if n in saved and b.is_floating_point()]
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *buffers):
            _unlike(name, tensor)


def _unlike(name: str, tensor: Tensor) -> None:
    if not torch.isfinite(tensor).all():  # left as the allocator gave it
        tensor.normal_(std=0.02)
    if name.endswith("A_log"):
        tensor.uniform_(0.05, 0.5).log_()
    elif tensor.numel() > 1 and float(tensor.max() - tensor.min()) == 0.0:
        tensor.add_(0.02 * torch.randn_like(tensor))
    if name.endswith("norm.weight") and abs(float(tensor.mean())) < 0.1:
        tensor.add_(0.5)


def move_by_half_an_ulp(model: Any) -> None:
    """Every float32 parameter by half an ulp on average, up or down as drawn: how well conditioned is a run?"""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            sign = (torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1).to(parameter.device)
            parameter.mul_(1 + 2 * HALF_ULP * sign)  # a step to one neighbour or none: half an ulp on average
