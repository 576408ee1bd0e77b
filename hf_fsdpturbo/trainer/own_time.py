"""``OwnTime``: the seconds of a logging window that a rank spends on its own, by which the slowest one is named.

In a synchronous step all ranks take equally long, as each waits for the slowest in some collective; what tells them
apart is the time outside of collectives. Two parts of it are known without touching the collectives:

- on every device the host's time between the optimizer's step and the first collective of the next one: waiting for
  data, collating, callbacks, garbage collection. A slow disk, loader or callback shows here.
- on CPU also the processor time of the main thread within the step: computing counts, waiting in gloo does not. Longer
  documents, or a throttled core, show here; a sleep inside of the model's forward does not.

An accelerator that computes slowly shows in neither: its host waits for it as it waits for other ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

SLOW = 0.1
"""Share of a window that ranks may wait for the slowest one before it is worth a line."""


class OwnTime(TrainerCallback):
    """One trainer's. Add it before callbacks with collectives of their own.

    Args:
        computes_on_host: whether the main thread's processor time is that of the step (device ``cpu``).
    """

    def __init__(self, computes_on_host: bool) -> None:
        self.computes_on_host = computes_on_host
        self.seconds = 0.0
        self.since: float | None = None  # start of a piece between steps
        self.computing: float | None = None  # processor time at the first collective of a step
        self.window = time.monotonic()

    def take(self) -> tuple[float, float]:
        """Own seconds and all seconds of the window, which ends here."""
        now = time.monotonic()
        taken = self.seconds, now - self.window
        self.seconds, self.window = 0.0, now
        return taken

    def arrived(self) -> None:
        """This rank has its batches, and goes to the first collective of a step."""
        self._close()
        if self.computes_on_host:
            self.computing = time.thread_time()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.take()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.computing is not None:
            self.seconds += time.thread_time() - self.computing
        self.computing, self.since = None, time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Logging, evaluating and saving are collective: what follows them is a new piece."""
        if control.should_log or control.should_evaluate or control.should_save:
            self._close()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.since = time.monotonic()

    on_evaluate = on_save = on_log

    def _close(self) -> None:
        if self.since is not None:
            self.seconds += time.monotonic() - self.since
        self.since = None


def slowest(own: Sequence[float], window: float) -> tuple[int, float]:
    """The rank with most own seconds, and the share of the window that the median rank waits for it at most.

    Args:
        own: seconds by rank.
        window: seconds.
    """
    rank = max(range(len(own)), key=own.__getitem__)
    return rank, max(own[rank] - statistics.median(own), 0.0) / max(window, 1e-9)


def straggler_line(own: Sequence[float], window: float) -> str | None:
    """A line where a rank is much slower than the median one, else None; arguments as those of :func:`slowest`."""
    rank, share = slowest(own, window)
    if share < SLOW:
        return None
    return (
        f"rank {rank} is the slowest: {own[rank]:.2f} of the last {window:.2f} s on its own (data, callbacks, on CPU "
        f"computing; the median rank: {statistics.median(own):.2f}). Others wait for it (docs/watching.md)."
    )
