"""A communication stream beside the current one: what is sent on it overlaps with what is computed meanwhile.

On CPU there are no streams: the same calls run in place. Tensors that cross streams are recorded on the side stream,
so that the allocator keeps their memory until the side stream has passed them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from hf_fsdpturbo.dispatch.traffic import TRAFFIC


@cache
def _side_stream(device_type: str, index: int) -> torch.Stream:
    """One side stream a device, for the life of the process."""
    return torch.Stream(device=torch.device(device_type, index))


class SideWork:
    """Work issued on the side stream: :meth:`wait` makes the current stream wait for it, the host does not."""

    def __init__(self, event: torch.Event | None, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        """Order the current stream behind the work. Safe to call more than once."""
        if self._event is not None:
            with TRAFFIC.waiting(self._device):
                torch.accelerator.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        """Block the host until the work is done."""
        if self._event is not None:
            self._event.synchronize()


class SideBlock:
    """Collects the event of a block; see :func:`beside`."""

    work: SideWork


@contextlib.contextmanager
def beside(device: torch.device, *tensors: Tensor) -> Iterator[SideBlock]:
    """Run a block on the side stream, behind everything issued so far on the current one.

    Args:
        device: device of the work; CPU runs the block in place.
        tensors: those made on the current stream and used in the block, inputs and outputs.

    Yields:
        A block whose ``work`` is there once the block has ended.
    """
    block = SideBlock()
    if device.type == "cpu":
        with TRAFFIC.waiting(device):
            yield block
        block.work = SideWork(None, device)
        return
    current = torch.accelerator.current_stream(device)
    side = _side_stream(device.type, current.device_index)
    side.wait_stream(current)
    with side:
        yield block
        for tensor in tensors:
            tensor.record_stream(side)
        block.work = SideWork(side.record_event(), device)
