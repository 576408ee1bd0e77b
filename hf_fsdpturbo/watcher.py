"""Calls that all ranks must make together: each rank says that it has come, and a call that only some make is named.

``all_call("save_model")`` returns once every rank has called it. A rank that does not come is either working (it may
come yet, and is waited for as long as its heart beats) or will never come: its process is gone, it waits in a call of
another name, or its main thread has sat in a collective since we wait, which can only end with our help. Then the call
is named with the ranks that made it and those that did not; ranks that wait here raise, ranks that sit in a collective
are ended by their watcher, a daemon thread.

A rank that leaves training with an error of its own says so too: the others raise or are ended with its message.

All of it goes through the default store of torch.distributed, on a connection of its own. Nothing is done in a step: a
watcher asks the store once in ``POLL`` seconds whether anybody waits.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from hf_fsdpturbo.ranks import FAILURES, rank, world_size
from hf_fsdpturbo.stacks import main_frames, waits_in

POLL = 2.0
SITS = 20.0
"""Seconds that a main thread stands at one place in a collective until it is taken for stuck."""
GONE = 45.0
"""Seconds without a heartbeat. Some calls hold Python's lock for long, such as writing a large safetensors file."""
GOODBYE = 10.0
"""Seconds that a rank which raises leaves the others to end: it may be the one that serves the store."""
TOGETHER = 2.0
"""Seconds between ranks that leave with one error, which all of them have."""
LAST_ANSWER = 5.0
"""Seconds that a process which ends leaves its watcher to hear from the store, which answers at once or is stopped."""

# Note [A watcher ends before Python]
# A thread that comes back from the store needs the interpreter's lock in a C++ destructor. If the interpreter is
# ending meanwhile, Python ends the thread there, and C++ answers with abort(): "terminate called without an active
# exception", exit code -6, after the model was saved. So the thread is ended and waited for at exit. Goes with
# Python 3.14, which leaves such threads hanging instead.

_watcher: Watcher | None = None


def all_call(name: str) -> None:
    """Wait until every rank has made this call; collective, and free in one process.

    Raises:
        ValueError: some ranks will not come; names the call, the ranks that made it and what the others do.
    """
    if world_size() > 1:
        this_rank().all_call(name)


def this_rank() -> Watcher:
    """The watcher of this process, which starts it; for runs of several processes."""
    global _watcher
    store = dist.distributed_c10d._get_default_store()
    if _watcher is None or _watcher.origin is not store:
        if _watcher is not None:
            _watcher.end()
        _watcher = Watcher(store)
    return _watcher


class Watcher:
    """This rank's part: its calls, counted, and the thread that answers those who wait.

    Args:
        store: the default store of the process group.

    Attributes:
        store: for the main thread; all ranks see it.
        each_poll: called by the watcher's thread once in ``POLL`` seconds with its own connection to that store.
    """

    def __init__(self, store: Any) -> None:
        self.origin = store
        self.store = dist.PrefixStore("hf_fsdpturbo", store.clone())  # for the main thread
        self.answers = dist.PrefixStore("hf_fsdpturbo", store.clone())  # for the watcher's
        self.each_poll: list[Callable[[Any], None]] = []
        self.calls = self.runs = 0
        self.beats = 0
        self.place: tuple[Any, float] = (None, time.monotonic())
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="hf_fsdpturbo watcher", daemon=True)
        self.thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        """End the thread and wait for it: see Note [A watcher ends before Python]."""
        atexit.unregister(self.end)
        self.ended.set()
        self.thread.join(LAST_ANSWER)

    # A rank that calls

    def all_call(self, name: str) -> None:
        """See :func:`all_call`."""
        call, self.calls = self.calls, self.calls + 1
        self.store.set(f"{call}/{rank()}", name)
        place = self.store.add(f"{call}/came", 1)
        if place == world_size():
            self.store.set(f"{call}/go", self._mismatch(call))
        self._wait(call, name, first=place == 1)
        if fault := self.store.get(f"{call}/go").decode():
            raise ValueError(fault)
        self._forget(call - 2, last=place == world_size())

    def _wait(self, call: int, name: str, first: bool) -> None:
        """Until all have come. The first that waits asks what the others do, once it has waited for a while."""
        started, pause, others = time.monotonic(), 0.001, None
        while not self.store.check([f"{call}/go"]):
            if self.store.check(["verdict"]):
                self._leave(self.store.get("verdict").decode())
            if first and others is None and time.monotonic() - started > POLL:
                others = _Others(self.store, call, name)
                self.store.add("asking", 1)
            if others is not None and (message := others.verdict()) is not None:
                self.store.set("verdict", message)
                self._leave(message)
            time.sleep(pause)
            pause = min(2 * pause, POLL / 4)
        if others is not None:
            self.store.add("asking", -1)

    def _mismatch(self, call: int) -> str:
        keys = [f"{call}/{other}" for other in range(world_size())]
        names = [value.decode() for value in self.store.multi_get(keys)]
        if len(set(names)) == 1:
            return ""
        made = {each: [other for other, found in enumerate(names) if found == each] for each in sorted(set(names))}
        calls = "; ".join(f"{each} on {_ranks(others)}" for each, others in made.items())
        return f"Ranks made different calls, each of which all ranks must make together: {calls}."

    def _forget(self, call: int, last: bool) -> None:
        """Remove a call's keys; all ranks have left it, as they have come to the one after it."""
        if call >= 0:
            for key in (str(rank()), *(("came", "go") if last else ())):
                self.store.delete_key(f"{call}/{key}")

    def _leave(self, message: str) -> None:
        """Raise, once the ranks that are to end have had their time: the store may be served by this process."""
        time.sleep(min(GOODBYE, 2.5 * POLL))
        raise ValueError(message)

    @contextlib.contextmanager
    def leaving_together(self) -> Iterator[None]:
        """Round what all ranks do together: an error of some of them only ends the others too, within a minute."""
        self.runs += 1
        try:
            yield
        except FAILURES as error:
            with contextlib.suppress(RuntimeError, dist.DistError):  # the store is gone: so is its rank
                self._left(f"left/{self.runs}", f"rank {rank()} left training with {type(error).__name__}: {error}")
            raise

    def _left(self, key: str, message: str) -> None:
        """Return when no rank needs the store any more, which this process may serve, or after a while."""
        self.store.add(key, 1)
        if self.store.check(["verdict"]):
            return  # what the others hear already is why this rank leaves
        if self._until(lambda: self.store.add(key, 0) >= world_size(), TOGETHER):
            return
        print(f"[hf_fsdpturbo] {message}", file=sys.stderr, flush=True)
        self.store.set("verdict", message)
        self.store.add("asking", 1)
        self._until(lambda: self.store.add(key, 0) + self.store.add("ended", 0) >= world_size(), SITS + 5 * POLL)
        if self.store.add(key, 0) >= world_size():  # all have raised, and may go on
            self.store.delete_key("verdict")
            self.store.add("asking", -1)

    def _until(self, reached: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (there := reached()) and time.monotonic() < end:
            time.sleep(0.02)
        return there

    # The thread

    def _watch(self) -> None:
        """Until the process ends or the store is gone (its server's process has ended)."""
        try:
            while not self.ended.wait(POLL):
                if self.answers.add("asking", 0) > 0:
                    self._answer()
                else:
                    self.place = (None, time.monotonic())
                for task in tuple(self.each_poll):
                    task(self.answers)
        except (RuntimeError, dist.DistError):
            return

    def _answer(self) -> None:
        sits = self._sits()
        self.beats += 1
        self.answers.set(f"beat/{rank()}", json.dumps({"beat": self.beats, "sits": sits}))
        if self.answers.check(["verdict"]) and sits is not None:
            message = self.answers.get("verdict").decode()
            print(f"[hf_fsdpturbo] rank {rank()} is ended: {message}", file=sys.stderr, flush=True)
            self.answers.add("ended", 1)
            os._exit(1)

    def _sits(self) -> str | None:
        """Where the main thread has stood in a collective for ``SITS`` seconds, in words, else None."""
        frames = main_frames()
        here = tuple((id(each), each.f_lasti) for each in frames)
        if here != self.place[0]:
            self.place = (here, time.monotonic())
        return waits_in(frames) if time.monotonic() - self.place[1] >= SITS else None


class _Others:
    """What the first rank that waits knows about the ranks that have not come."""

    def __init__(self, store: Any, call: int, name: str) -> None:
        self.store, self.call, self.name = store, call, name
        self.seen: dict[int, tuple[int, float]] = {}  # by rank: the last heartbeat, and when it was new
        self.asked = self.since = time.monotonic()

    def verdict(self) -> str | None:
        """The message if no rank that has not come will come, else None; asks the store once in ``POLL`` seconds."""
        now = time.monotonic()
        if now - self.asked < POLL:
            return None
        self.asked = now
        missing = [r for r in range(world_size()) if not self.store.check([f"{self.call}/{r}"])]
        states = {other: self._state(other, now) for other in missing}
        if not states or any(state is None for state in states.values()):
            return None
        made = [other for other in range(world_size()) if other not in missing]
        others = "; ".join(f"rank {other} {state}" for other, state in states.items())
        return (
            f"{self.name} was called by {_ranks(made)} of {world_size()} only, but all ranks must call it together: "
            f"{others}. Call it on every rank: take it out of the `if` that asks for the main process; what is to be "
            "written is written once."
        )

    def _state(self, other: int, now: float) -> str | None:
        """What keeps a rank from coming, or None while it works."""
        key = f"beat/{other}"
        answer: dict[str, Any] = {"beat": 0, "sits": None}
        if self.store.check([key]):
            answer = json.loads(self.store.get(key))
        beat, since = self.seen.get(other, (0, self.since))
        if answer["beat"] != beat:
            self.seen[other] = (answer["beat"], since := now)
        if now - since > GONE:
            return f"has given no sign for {now - since:.0f} s (its process has ended, or hangs)"
        return f"waits in {answer['sits']}" if answer["sits"] else None


def _ranks(found: list[int]) -> str:
    return f"rank {', '.join(map(str, found))}"
