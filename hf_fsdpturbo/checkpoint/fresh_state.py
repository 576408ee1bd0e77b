"""AdamW's state before it is filled from a checkpoint, made a few parameters at a time.

torch makes an optimizer's state by a step at rate 0 with gradients of zero for all parameters at once: half as much
memory again as the moments, for a moment. Adam's step asks nothing of other parameters, so a part of them does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.optim.one_pass import AdamW
from hf_fsdpturbo.shards import local_tensor

GRADIENT_BYTES = 256 * 2**20
"""Gradients that are there at a time, on a rank; a larger parameter's alone."""


def make_state(optimizer: torch.optim.Optimizer) -> bool:
    """Give every trained parameter state tensors of the right placement, dtype and device.

    Args:
        optimizer: without wrapper.

    Returns:
        whether it did; False for other classes than Adam and AdamW, with gradients, or with a state.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, AdamW) or optimizer.state:
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if any(parameter.grad is not None for parameter in parameters):
        return False
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    try:
        for some in _pieces(parameters):
            for parameter in some:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for parameter in some:
                parameter.grad = None
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    return True


def _pieces(parameters: list[Any]) -> Iterator[list[Any]]:
    some: list[Any] = []
    held = 0
    for parameter in parameters:
        size = local_tensor(parameter).nbytes
        if some and held + size > GRADIENT_BYTES:
            yield some
            some, held = [], 0
        some.append(parameter)
        held += size
    if some:
        yield some
