"""``Clock``: how long the steps of a logging window took, and how long of that this rank waited for its data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any


class Clock:
    """Host time. At a logging step Trainer has waited for the device, so a window holds whole steps.

    What a run does between steps besides training, evaluation and saving, is taken out.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._begun: float | None = None  # the first batch is asked for: a resumed run has skipped its data by then
        self._mark = 0.0
        self._away = 0.0

    def batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """The same batches; the time that each takes to come is counted."""
        self._begun = time.perf_counter() if self._begun is None else self._begun
        return _Timed(source, self)

    def mark(self) -> None:
        """A step has ended, or its log line has."""
        self._mark = time.perf_counter()

    def was_away(self) -> None:
        """Evaluation or saving, which began at the last mark, has ended."""
        now = time.perf_counter()
        if self._begun is not None:  # one before the first step is in no window
            self._away += now - self._mark
        self._mark = now

    def window(self) -> tuple[float, float]:
        """``(seconds of training, of them waiting for data)`` since the last call; the next window begins now."""
        now = time.perf_counter()
        seconds = now - (now if self._begun is None else self._begun) - self._away
        waited, self.waited = self.waited, 0.0
        self._begun, self._away = now, 0.0
        return seconds, waited


class _Timed:
    def __init__(self, source: Iterator[Any], clock: Clock) -> None:
        self.source, self.clock = source, clock

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        begun = time.perf_counter()
        try:
            return next(self.source)
        finally:
            self.clock.waited += time.perf_counter() - begun
