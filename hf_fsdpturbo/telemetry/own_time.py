"""``OwnTime``: the seconds of a logging window that a rank spends on its own, by which the slowest one is named.

In a synchronous step all ranks take equally long, as each waits for the slowest in some collective; what tells them
apart is the time outside of collectives. Known of it, without touching any:

- on every device the host's time from the optimizer's step to the step's last batch: callbacks, garbage collection,
  waiting for data, collating. A slow disk, loader or callback shows here. (At a logging step it begins after the log.)
- on CPU the main thread's processor time within the step: computing counts, waiting in gloo does not. Longer documents
  or a throttled core show here; a sleep inside of the model's forward does not.
- on an accelerator the time that its device waits in the experts' exchanges (``dispatch/traffic.py``), taken off: who
  computes slowly waits least. Models without experts have none: a slow device of theirs does not show.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

SLOW = 0.1
"""Share of a window that others wait for the slowest rank, from which on it is worth a line."""


class OwnTime:
    """One rank's.

    Args:
        computes_on_host: whether the main thread's processor time is that of the step (device ``cpu``).
    """

    def __init__(self, computes_on_host: bool) -> None:
        self.computes_on_host = computes_on_host
        self.seconds = 0.0
        self._since: float | None = None  # where a piece between steps goes on from
        self._computing: float | None = None  # processor time at the start of a step

    def take(self) -> float:
        """Own seconds since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """The same batches; what went by until each came is counted."""
        for batch in source:
            self._count()
            yield batch

    def begins(self) -> None:
        """What other ranks do not wait for together with this one begins: after an optimizer's step, a log line."""
        self._since = time.perf_counter()

    def stops(self) -> None:
        """Collectives follow."""
        self._since = None

    def step_begins(self) -> None:
        """From here on the main thread computes, or waits."""
        self.stops()
        self._computing = time.thread_time() if self.computes_on_host else None

    def stepped(self) -> None:
        """The optimizer has."""
        if self._computing is not None:
            self.seconds += time.thread_time() - self._computing
        self._computing = None
        self.begins()

    def _count(self) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self.seconds += now - self._since
            self._since = now


def slowest(own: Sequence[float], window: float) -> tuple[int, float]:
    """The rank with most own seconds, and the share of the window that the median rank waits for it at most.

    Args:
        own: seconds by rank; differences count only.
        window: seconds.
    """
    rank = max(range(len(own)), key=own.__getitem__)
    return rank, max(own[rank] - statistics.median(own), 0.0) / max(window, 1e-9)
