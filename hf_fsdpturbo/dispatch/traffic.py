"""What experts' exchanges of this process move, and how long its device waits for them; off until somebody asks.

Note [Who waits]. On an accelerator a pair of events brackets the place where the computing stream waits for rows: an
exchange that ends under other work costs nothing there. Events are read once they have passed, so no host waits for
one. On CPU the call itself is timed.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Traffic:
    """Counters that only grow.

    Attributes:
        is_on: whether anything is counted now.
        bytes: sent to other ranks, as exchanges of rows (forward, backward, recompute).
        seconds: that the device waited, of events that have passed.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.bytes = 0
        self.seconds = 0.0
        self._pending: deque[tuple[torch.Event, torch.Event]] = deque()
        self._free: list[tuple[torch.Event, torch.Event]] = []

    def sent(self, rows: Tensor, splits: list[int], group: ProcessGroup) -> None:
        """``rows`` leave, ``splits[r]`` of them to rank r of the group."""
        if self.is_on and len(rows):
            own = splits[dist.get_rank(group)]
            self.bytes += (sum(splits) - own) * (rows.numel() // len(rows)) * rows.element_size()

    @contextlib.contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Round what makes the computing stream (on CPU, the process) wait. See Note [Who waits]."""
        if not self.is_on:
            yield
            return
        if device.type == "cpu":
            begun = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - begun
            return
        first, last = self._free.pop() if self._free else (_event(device), _event(device))
        first.record()
        yield
        last.record()
        self._pending.append((first, last))

    def collect(self) -> None:
        """Read the events that have passed; waits for none."""
        while self._pending and self._pending[0][1].query():
            pair = self._pending.popleft()
            self.seconds += pair[0].elapsed_time(pair[1]) / 1e3
            self._free.append(pair)


def _event(device: torch.device) -> torch.Event:
    return torch.Event(device=device, enable_timing=True)


TRAFFIC = Traffic()
"""This process's: a dispatcher knows groups, sizes and tensors only, so exchanges have no other way to a trainer."""
