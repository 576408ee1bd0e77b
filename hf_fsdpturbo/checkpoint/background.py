"""Asynchronous saves: shards are copied to host memory, training goes on, a thread writes and commits.

The collectives of the writing thread run on a gloo group of their own: on the default group they would mix with those
of training (seen: hangs).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hf_fsdpturbo.checkpoint import dcp
from hf_fsdpturbo.ranks import FAILURES, rank, world_size

_group: dist.ProcessGroup | None = None


def own_group(timeout: timedelta) -> dist.ProcessGroup | None:
    """The gloo group of background saves, made once a process; collective the first time."""
    global _group
    if _group is None and world_size() > 1:
        _group = dist.new_group(backend="gloo", timeout=timeout)
    return _group


class BackgroundSave:
    """One save in progress. Construction copies the shards and returns; every rank constructs it (collective).

    Args:
        state: tensors by DCP key.
        directory: DCP directory, in staging.
        timeout: how long ranks wait for each other.
    """

    def __init__(self, state: dict[str, Tensor], directory: str, timeout: timedelta) -> None:
        self.future: Any = dcp.save_async(state, directory, own_group(timeout))
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def then(self, commit: Callable[[], Any]) -> None:
        """On rank 0, run ``commit`` in a thread once all ranks have written: its own save is done last."""
        if rank() == 0:
            self.thread = threading.Thread(target=self._finish, args=(commit,), name="commit checkpoint", daemon=True)
            self.thread.start()

    def _finish(self, commit: Callable[[], Any]) -> None:
        try:
            self.future.result()
            commit()
        except FAILURES as error:
            self.error = error

    def wait(self) -> BaseException | None:
        """Wait for writing and commit; returns what failed here."""
        if self.thread is not None:
            self.thread.join()
            return self.error
        try:
            self.future.result()
        except FAILURES as error:
            return error
        return None
