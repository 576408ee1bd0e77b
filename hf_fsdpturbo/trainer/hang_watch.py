"""``HangWatch``: where no step ends for ``hang_timeout`` seconds, stacks are written, the rank named, the run ended.

All of it happens in the watcher's thread, as main threads wait for each other. Each rank looks at a clock of its own,
which starts anew at each micro-batch, optimizer step and step of an evaluation, and stands still while a checkpoint is
written, and in an evaluation outside of its steps. The first step of a run (compilers, kernel tuning, communicators)
has the group timeout at least. The first rank whose clock runs out says so in the store; then every rank that can
writes ``hang/rank_N.txt`` in ``output_dir`` and answers where its main thread stands. A rank that does not wait in a
collective, or does not answer, is the one that has stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from hf_fsdpturbo.ranks import rank, world_size
from hf_fsdpturbo.stacks import all_stacks, main_frames, stands_in, waiting
from hf_fsdpturbo.trainer.flight_recorder import recorded
from hf_fsdpturbo.watcher import this_rank

ANSWER = 20.0
"""Seconds that ranks have to answer: a few looks at the store, and what calls may hold Python's lock for."""
PAUSE = 0.2
EARLIER = 1.1
"""Seconds that the rank which names the cause is ahead of the others: launchers report the first, by whole seconds."""
SHARE = 0.9
"""Of the group timeout, where ``hang_timeout`` is left out: stacks are there before torch ends the ranks."""


class HangError(RuntimeError):
    """No step within ``hang_timeout``; names the rank that stopped."""


class HangWatch(TrainerCallback):
    """One trainer's.

    Args:
        config: read for ``output_dir``, ``ddp_timeout`` (seconds, which ``dist_timeout`` has set) and ``hang_timeout``
            (seconds, or None: nine tenths of the former).

    Attributes:
        clock: when a sign of progress was last seen, and the seconds until the next is due; None: it stands still.
    """

    def __init__(self, config: Any) -> None:
        self.folder = os.path.join(config.output_dir, "hang")
        self.first = self.timeout = config.ddp_timeout * SHARE
        if config.hang_timeout is not None:
            self.timeout = float(config.hang_timeout)
            self.first = max(self.first, self.timeout)
        self.clock: tuple[float, float] | None = None
        self.limit = self.first
        self.step = 0
        self.evaluated = 0
        self.looks: list[Any] | None = None  # what the watcher does at each poll, while we are part of it

    # The clock, moved by the main thread

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.limit, self.step = self.first, state.global_step
        self.looks = this_rank().each_poll
        self.looks.append(self._look)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first one starts the clock: before it a resumed run has skipped its data, which may take hours."""
        self._goes_on()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._goes_on()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.limit, self.step = self.timeout, state.global_step
        self._goes_on()
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the last step come the best model, uploads and what users add: not watched."""
        if control.should_training_stop:
            self.clock = None

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between two steps of an evaluation the clock runs; metrics, after the last one, take what they take."""
        self.evaluated += 1
        loader: Any = kwargs.get("eval_dataloader")
        more = has_length(loader) and self.evaluated < len(loader)  # of a stream nobody knows
        self._goes_on() if more else self._stands_still()

    def end(self) -> None:
        """Training is over, in whatever way."""
        self.clock = None
        looks, self.looks = self.looks, None
        if looks is not None:
            looks.remove(self._look)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The clock stands still inside, and starts anew after."""
        ran, self.clock, self.evaluated = self.clock is not None, None, 0
        try:
            yield
        finally:
            self._goes_on() if ran else self._stands_still()

    def _goes_on(self) -> None:
        self.clock = (time.monotonic(), self.limit)

    def _stands_still(self) -> None:
        self.clock = None

    # The end, in the watcher's thread

    def _look(self, store: Any) -> None:
        clock = self.clock
        if clock is not None and time.monotonic() - clock[0] > clock[1]:
            store.set("hang", f"{clock[1]:g}")
        elif not store.check(["hang"]):
            return
        self._end(store)

    def _end(self, store: Any) -> None:
        seconds = store.get("hang").decode()
        store.set(f"hang/{rank()}", json.dumps(self._write(seconds)))
        if store.add("hang/writers", 1) == 1:
            message = self._judge(store, seconds)
            print(f"[hf_fsdpturbo] {message}", file=sys.stderr, flush=True)
            _tell_launcher(message)
            time.sleep(EARLIER)
            store.set("hang/verdict", message)
            time.sleep(ANSWER / 4)  # the others go first: this process may serve the store
        else:
            deadline = time.monotonic() + 2 * ANSWER
            while not store.check(["hang/verdict"]) and time.monotonic() < deadline:
                time.sleep(PAUSE)
            message = store.get("hang/verdict").decode() if store.check(["hang/verdict"]) else "hang_timeout ran out"
            print(f"[hf_fsdpturbo] rank {rank()} is ended: {message.split('. ')[0]}.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)

    def _write(self, seconds: str) -> dict[str, str | None]:
        """This rank's file; returns the collective it waits in, or else where it stands."""
        collective = waiting()
        answer = {"waits": collective, "stands": stands_in(main_frames())}
        place = f"waits in {collective}" if collective else f"stands in {answer['stands']}"
        head = (
            f"rank {rank()} of {world_size()}, {socket.gethostname()}, process {os.getpid()}, "
            f"{time.strftime('%Y-%m-%d %H:%M:%S')}\nNo step for {seconds} s; the last one was step {self.step}.\n"
            f"The main thread {place}.\n"
        )
        self._file(rank(), f"{head}\n{all_stacks()}\n{recorded()}")
        return answer

    def _file(self, of_rank: int, text: str) -> None:
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(os.path.join(self.folder, f"rank_{of_rank}.txt"), "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:  # a full disk is no reason not to end, and the log has room
            print(f"[hf_fsdpturbo] {self.folder}: {error.strerror}\n{text}", file=sys.stderr, flush=True)

    def _judge(self, store: Any, seconds: str) -> str:
        """Wait for all answers, or as long as ``ANSWER``; the error's message. Writes the files of silent ranks."""
        keys, deadline = [f"hang/{other}" for other in range(world_size())], time.monotonic() + ANSWER
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(PAUSE)
        answers = {other: json.loads(store.get(key)) if store.check([key]) else None for other, key in enumerate(keys)}
        for other in [other for other, answer in answers.items() if answer is None]:
            self._file(other, f"rank {other} gave no sign for {ANSWER:g} s, and so could not write its stacks.\n")
        return in_words(answers, seconds, self.step, self.folder)


def _tell_launcher(message: str) -> None:
    """Leave the error where a launcher looks for the cause: it prints the traceback of what is being handled."""
    try:
        raise HangError(message)
    except HangError as error:
        get_error_handler().record_exception(error)


def in_words(answers: dict[int, dict[str, str | None] | None], seconds: str, step: int, folder: str) -> str:
    """The error's message.

    Args:
        answers: by rank what :meth:`HangWatch._write` returned there; None: no answer.
        seconds: without a step.
        step: the last that ended.
        folder: of the stacks.
    """
    places: dict[str, list[int]] = {}
    for other, answer in answers.items():
        if answer is None:
            place = "gives no sign (its process is stopped or gone, or a call holds Python's lock)"
        else:
            place = f"waits in {answer['waits']}" if answer["waits"] else f"stands in {answer['stands']}"
        places.setdefault(place, []).append(other)
    stopped = [found for place, found in places.items() if not place.startswith("waits")]
    names = ", ".join(map(str, sorted(sum(stopped, []))))
    what = f"rank {names} stopped" if names else "all ranks wait, not in the same collective or not for each other"
    order = sorted(places.items(), key=lambda item: (item[0].startswith("waits"), item[1]))
    states = "; ".join(f"rank {', '.join(map(str, found))} {place}" for place, found in order)
    return (
        f"No step for {seconds} s (hang_timeout), after step {step}: {what}. {states}. Python stacks are in "
        f"{os.path.join(folder, 'rank_N.txt')}. A step that takes longer than that needs a larger hang_timeout."
    )
