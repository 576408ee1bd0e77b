"""``BatchesAhead``: before a log line waits for an accelerator, the host fetches the next step's batches.

Note [What the device waits for between steps]. A log line reads the loss, so the host waits until the step has ended
on the device, and only then collates the next batch: 9 ms of a 217 ms step on an H200 with TRL's collator in the main
process (16,384 tokens). Fetched before the line, that work lies beside the optimizer's step; in a step without a line
the host is ahead of the device anyway, if the copy of a batch does not make it wait: pinned memory is copied without.

Nothing is fetched that the run would not read: not past the loader's last batch (accelerate looks one batch ahead and
knows it), nor after the last step; nor at a step that saves, so that the random state in a checkpoint is the usual
one, or evaluates. An error while fetching is raised where the batch is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from hf_fsdpturbo.ranks import FAILURES


class BatchesAhead(TrainerCallback):
    """One trainer's; the iterator that Trainer takes a step's batches from.

    Args:
        trainer: read for its accelerator.
        accelerates: whether the device works beside the host.
    """

    def __init__(self, trainer: Any, accelerates: bool) -> None:
        self.trainer, self.accelerates = trainer, accelerates
        self._source: Any = None
        self._batches: Iterator[Any] = iter(())
        self._held: list[Any] = []
        self._error: BaseException | None = None
        self._taken = 0

    def of_step(self, source: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``, which reads ``source``, behind what was fetched of that source already."""
        if source is not self._source:
            self._source, self._held, self._error = source, [], None
        self._batches, self._taken = batches, 0
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._taken += 1
        if self._held:
            return self._held.pop(0)
        if self._error is not None:
            raise self._error
        return next(self._batches)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ranks log at the same steps: where fetching is collective, all fetch."""
        others = control.should_save or control.should_evaluate or control.should_training_stop
        if self.accelerates and control.should_log and not others and state.global_step < state.max_steps:
            self._fetch(self._taken)

    def _fetch(self, number: int) -> None:
        for _ in range(number):
            if self.trainer.accelerator.gradient_state.end_of_dataloader:
                return
            try:
                self._held.append(next(self._batches))
            except FAILURES as error:  # StopIteration too
                self._error = error
                return

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last loader is let go."""
        self.of_step(None, iter(()))
