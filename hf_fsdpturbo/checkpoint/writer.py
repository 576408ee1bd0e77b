"""One live run writes into an ``output_dir``: a claim file says which; a second one is refused, a stale claim taken.

``_writer.json`` holds host, process, start and a random name of the run. Its owner touches it once in ``BEAT`` seconds
from a thread. A claim is stale where its process is gone (same host) or nothing has touched it for ``STALE`` seconds.
Times are those of the file system, which all hosts share: their clocks may differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from typing import Any

from hf_fsdpturbo.bounded import parse_json, read_text

CLAIM = "_writer.json"
BEAT = 30.0
STALE = 300.0


class Writer:
    """The claim of this run on a directory; one rank makes it.

    Args:
        run_dir: made if it is not there.

    Attributes:
        run: the run's own name, part of the names in its staging folder.
        note: what a taken-over claim was, in one line, else None.

    Raises:
        ValueError: another live run writes there; names host, process and start.
    """

    def __init__(self, run_dir: str) -> None:
        self.path = os.path.join(run_dir, CLAIM)
        self.run = uuid.uuid4().hex[:8]
        self.note: str | None = None
        self._ended = threading.Event()
        os.makedirs(run_dir, exist_ok=True)
        self._claim(run_dir)
        self._thread = threading.Thread(target=self._beat, name="hf_fsdpturbo writer", daemon=True)
        self._thread.start()

    def _claim(self, run_dir: str) -> None:
        for _ in range(3):
            try:
                descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                self._take_over(run_dir)
                continue
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(_myself(self.run), file)
            return
        raise ValueError(f"output_dir: {self.path} is made and removed by several runs that start now. Start one.")

    def _take_over(self, run_dir: str) -> None:
        """Move a stale claim aside: of several runs that find it stale, one succeeds."""
        found = read_claim(self.path)
        if found is None:
            return
        reason = stale(found, self.path)
        if reason is None:
            raise ValueError(
                f"output_dir: {run_dir} is written by another run (process {found['pid']} on {found['host']}, since "
                f"{found['since']}). Two runs would mix their checkpoints. Choose another output_dir, or end that run "
                f"(if it has ended, remove {self.path})."
            )
        aside = f"{self.path}.{self.run}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            taken = read_claim(aside)
            os.remove(aside)
            if taken is not None and taken.get("run") == found.get("run"):
                self.note = (
                    f"output_dir: {run_dir} was claimed by process {found['pid']} on {found['host']} since "
                    f"{found['since']}, {reason}. This run takes it over."
                )

    def is_ours(self) -> bool:
        """Whether the claim is still this run's: a run that stood still for long may have been taken over."""
        found = read_claim(self.path)
        return found is not None and found.get("run") == self.run

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):  # a full or absent disk is what the next save tells of
                if self.is_ours():
                    os.utime(self.path)

    def release(self) -> None:
        """Remove the claim, if it is still ours."""
        self._ended.set()
        with contextlib.suppress(OSError):
            if self.is_ours():
                os.remove(self.path)


def _myself(run: str) -> dict[str, Any]:
    since, pid = time.strftime("%Y-%m-%d %H:%M:%S %Z"), os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "since": since, "run": run, "boot": _start_of(pid)}


def read_claim(path: str) -> dict[str, Any] | None:
    """Content of a claim; None where there is none. One that is being written, or was cut short, has no names."""
    unknown = {"host": "an unknown host", "pid": "unknown", "since": "an unknown time", "run": "", "boot": None}
    try:
        content = parse_json(read_text(path), path)
    except FileNotFoundError:
        return None
    except ValueError:
        return unknown
    return {**unknown, **content} if isinstance(content, dict) else unknown


def stale(claim: dict[str, Any], path: str) -> str | None:
    """Why a claim's run is over, in words; None where it may be alive."""
    if claim["host"] == socket.gethostname() and isinstance(claim["pid"], int) and 0 < claim["pid"] < 2**31:
        started = _start_of(claim["pid"])
        if started is None or (claim["boot"] is not None and started != claim["boot"]):
            return "whose process is gone"
        return None
    try:
        silent = _now_of(os.path.dirname(path)) - os.stat(path).st_mtime
    except FileNotFoundError:
        return None
    return f"which has given no sign for {silent / 60:.0f} minutes" if silent > STALE else None


def _start_of(pid: int) -> str | None:
    """When a process of this host started, so that a number given out again is not taken for it; None: no such one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # another user's, alive
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""  # not Linux


def _now_of(directory: str) -> float:
    """The file system's clock."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix="_clock") as file:
        return os.stat(file.name).st_mtime
