"""Asynchronous saves: shards are copied to host memory, training goes on, a thread writes and commits.

Threads hold no collective: on the groups of training they would mix with those of training (seen: hangs), and a group
of their own connects every rank with every other. A rank that has written says so in the store that all ranks met in.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from hf_fsdpturbo.checkpoint import dcp_save
from hf_fsdpturbo.checkpoint.shard_file import Written
from hf_fsdpturbo.ranks import FAILURES, rank, together, world_size

POLL_SECONDS = 0.1
LAST_SECONDS = 60.0
"""How long a rank 0 that leaves with an error waits after the last word of another rank: that may be gone."""


class BackgroundSave:
    """One save in progress. Construction copies the shards and returns; every rank constructs it (collective).

    Args:
        state: tensors by DCP key.
        directory: DCP directory, in staging.
        timeout: how long rank 0 waits for the others.

    Raises:
        CheckpointError: the shards could not be copied; on every rank.
    """

    def __init__(self, state: dict[str, Tensor], directory: str, timeout: timedelta) -> None:
        self.directory, self.timeout = directory, timeout
        self.save_id = dcp_save.new_save_id()
        with together("copying shards"):
            parts = dcp_save.host_parts(state)
        self.error: BaseException | None = None
        self.leaving = threading.Event()
        self.written: Written | None = None
        self._store: Any = _get_default_store() if world_size() > 1 else None
        self.thread = threading.Thread(target=self._write, args=(parts,), name="write shards", daemon=True)
        self.thread.start()

    def _key(self, of: int | str) -> str:
        return f"fsdpturbo/{self.save_id}/{of}"

    def _write(self, parts: list[Any]) -> None:
        try:
            self.written = dcp_save.write_own(self.directory, self.save_id, parts)
        except FAILURES as error:
            self.error = error
        parts.clear()
        if self._store is not None and rank() != 0:
            said = None if self.written is None else [self.written.places, self.written.trailer]
            self._store.set(self._key(rank()), json.dumps(said))
            self._store.add(self._key("number"), 1)

    def then(self, commit: Callable[[], Any]) -> None:
        """On rank 0, write the index and run ``commit`` in a thread once all ranks have written."""
        if rank() == 0:
            writing = self.thread
            self.thread = threading.Thread(
                target=self._finish, args=(writing, commit), name="commit checkpoint", daemon=True
            )
            self.thread.start()

    def _finish(self, writing: threading.Thread, commit: Callable[[], Any]) -> None:
        try:
            theirs = self._theirs()
            writing.join()
            if self.error is None and None not in theirs:
                assert self.written is not None
                dcp_save.write_index(self.directory, self.save_id, [self.written, *theirs])  # type: ignore[list-item]
                commit()
        except FAILURES as error:
            self.error = error

    def _theirs(self) -> list[Written | None]:
        """What the other ranks say, in order; None of one that failed, which says itself why."""
        keys = [self._key(index) for index in range(1, world_size())]
        number, last = 0, time.monotonic() + LAST_SECONDS
        deadline = time.monotonic() + self.timeout.total_seconds()
        while number < len(keys):
            before, number = number, self._store.add(self._key("number"), 0)
            if number > before or not self.leaving.is_set():
                last = time.monotonic() + LAST_SECONDS
            if time.monotonic() > min(deadline, last):
                late = [index for index in range(1, world_size()) if not self._store.check([self._key(index)])]
                raise TimeoutError(f"ranks {late[:8]} have not said that their shards are written")
            time.sleep(POLL_SECONDS)
        said = [json.loads(self._store.get(key)) for key in keys]
        for key in [*keys, self._key("number")] if keys else ():
            self._store.delete_key(key)
        return [None if values is None else Written(*values) for values in said]

    def wait(self, leaving: bool = False) -> BaseException | None:
        """Wait for writing and commit; returns what failed here.

        Args:
            leaving: this rank has failed, and others may have: they are not waited for without end.
        """
        if leaving:
            self.leaving.set()
        self.thread.join()
        return self.error
