"""H1: what a rank that waits knows of the others, and where a main thread stands; no process group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from hf_fsdpturbo import watcher
from hf_fsdpturbo.stacks import inside_packages
from hf_fsdpturbo.watcher import _Others


class Store:
    """What a store keeps, in a dict."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = str(value).encode()

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)


@pytest.fixture
def others(monkeypatch):
    """Four ranks, of which 0 and 2 have called; the clock stands still unless it is moved."""
    clock = [100.0]
    monkeypatch.setattr(watcher, "world_size", lambda: 4)
    monkeypatch.setattr(watcher.time, "monotonic", lambda: clock[0])
    store = Store()
    for came in (0, 2):
        store.set(f"7/{came}", "save_model")
    return clock, store, _Others(store, 7, "save_model")


def beats(store: Store, clock: list[float], seconds: float, **sits: str | None):
    """``seconds`` go by, in which ranks 1 and 3 answer; ``sits`` by rank."""
    for _ in range(int(seconds)):
        clock[0] += 1.0
        for rank in (1, 3):
            answer = {"beat": clock[0], "sits": sits.get(f"rank{rank}")}
            if f"rank{rank}" in sits:
                store.set(f"beat/{rank}", json.dumps(answer))


def test_a_working_rank_is_waited_for_as_long_as_its_heart_beats(others):
    clock, store, seen = others
    for _ in range(100):
        beats(store, clock, 10, rank1=None, rank3="all_reduce")
        assert seen.verdict() is None


def test_ranks_that_sit_are_named_with_those_that_called(others):
    clock, store, seen = others
    beats(store, clock, 10, rank1="all_reduce", rank3="barrier")
    said = seen.verdict() or ""
    assert said.startswith("save_model was called by rank 0, 2 of 4 only, but all ranks must call it together")
    assert "rank 1 waits in all_reduce" in said
    assert "rank 3 waits in barrier" in said


def test_a_rank_without_a_heartbeat_is_gone_within_a_minute(others):
    clock, store, seen = others
    seconds = 0
    while (said := seen.verdict()) is None:
        beats(store, clock, 1, rank3="barrier")
        seconds += 1
        assert seconds <= 60
    assert "rank 1 has given no sign" in said


def test_the_store_is_asked_now_and_then(others):
    clock, store, seen = others
    beats(store, clock, 1, rank1="all_reduce", rank3="barrier")
    assert seen.verdict() is None, "asked again before POLL seconds have gone by"


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("/a/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", "torch/distributed/c10d.py"),
        ("/usr/lib/python3/dist-packages/torch/autograd/graph.py", "torch/autograd/graph.py"),
        (threading.__file__, ""),
        ("<string>", ""),
        ("/code/train.py", "/code/train.py"),
    ],
)
def test_files_by_whose_they_are(file, found):
    assert inside_packages(file) == found


def test_where_a_main_thread_stands(monkeypatch):
    """In a collective for long; not while it works, nor in a user's code."""
    monkeypatch.setattr(watcher.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(watcher, "SITS", 0.2)
    rank = watcher.Watcher.__new__(watcher.Watcher)
    rank.place = (None, time.monotonic())
    found: dict[str, list[str | None]] = {"work": [], "collective": []}

    def look(where: str) -> None:
        for _ in range(6):
            time.sleep(0.1)
            found[where].append(rank._sits())

    def stand(where: str, wait) -> None:
        thread = threading.Thread(target=look, args=(where,))
        thread.start()
        wait(thread)

    stand("work", lambda thread: thread.join())
    package = os.path.join(os.path.dirname(torch.__file__), "distributed", "made_up.py")
    names: dict = {}
    exec(compile("def all_reduce(thread):\n    thread.join()", package, "exec"), names)
    stand("collective", names["all_reduce"])
    assert found["work"] == [None] * 6
    assert found["collective"][0] is None
    assert "all_reduce, called by" in (found["collective"][-1] or "")


LEAVE = """
import torch.distributed as dist
from hf_fsdpturbo import watcher

watcher.POLL = 1e-5
store = dist.TCPStore("127.0.0.1", 0, 1, True)
many = [watcher.Watcher(store) for _ in range(8)]
"""


def test_a_process_that_ends_while_watchers_ask_ends_with_0():
    """Watchers that are not waited for abort it: the model is saved, and the launcher reports exit code -6."""
    ended = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr[-2000:]
