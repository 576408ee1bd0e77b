"""``AgreedStop``: with ``enable_jit_checkpoint`` all ranks save the same step, whichever of them got SIGTERM and when.

Transformers' own callback acts on each rank by itself: ranks signalled a moment apart save different steps, which is
a collective mismatch. Here a signalled rank says so in the store, from its watcher's thread. Each rank's watcher then
answers with the step at whose end its main thread will look next, and from then on the main thread goes past that step
only once it has all answers: the largest is the step that all save. No step costs more than a lock.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from typing import Any

from transformers import TrainerCallback

from hf_fsdpturbo.ranks import rank, world_size
from hf_fsdpturbo.watcher import this_rank

PAUSE = 0.05

_runs = itertools.count()  # all ranks train equally often: what was said in one run is not heard in the next


class AgreedStop(TrainerCallback):
    """In place of Transformers' ``JITCheckpointCallback`` in runs of several processes.

    Args:
        trainer: its ``_save_checkpoint`` is called, by all ranks at one step.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.lock = threading.Lock()
        self.signalled = False  # set in a signal handler: nothing else may happen there
        self.next_end = 0  # the step at whose end the main thread looks next
        self.answered: int | None = None
        self.before: Any = None
        self.key = "sigterm"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.key = f"sigterm/{next(_runs)}"
        self.signalled, self.answered = False, None
        self.before = signal.signal(signal.SIGTERM, self._signalled)
        self.next_end = state.global_step + 1
        this_rank().each_poll.append(self._look)

    def _signalled(self, number: int, frame: Any) -> None:
        self.signalled = True

    def _look(self, store: Any) -> None:
        """In the watcher's thread: pass a signal on, and answer one that any rank got."""
        with self.lock:
            if self.answered is not None:
                return
            if self.signalled:
                store.set(self.key, "1")
            elif not store.check([self.key]):
                return
            self._answer(store)

    def _answer(self, store: Any) -> None:
        self.answered = self.next_end
        store.set(f"{self.key}/{rank()}", str(self.answered))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on, or save and stop."""
        with self.lock:
            self.next_end = state.global_step + 1
            if self.answered is None or state.global_step < self.answered:
                return
        if state.global_step == self._agreed():
            control.should_training_stop, control.should_save = True, False
            if rank() == 0:
                print(f"[hf_fsdpturbo] SIGTERM: all ranks save step {state.global_step} and stop.", flush=True)
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def _agreed(self) -> int:
        """The largest of all ranks' answers; their watchers give them whatever their main threads wait for."""
        keys, store = [f"{self.key}/{other}" for other in range(world_size())], this_rank().store
        while not store.check(keys):
            if store.check(["verdict"]):  # another rank has left
                raise ValueError(store.get("verdict").decode())
            time.sleep(PAUSE)
        return max(int(answer) for answer in store.multi_get(keys))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, self.before)
        this_rank().each_poll.remove(self._look)
        with self.lock:
            if self.answered is None:  # a rank that was asked at the last step may wait for this answer: no step
                self._answer(this_rank().store)
