"""Many ranks in one process: torch's fake group (collectives do nothing) and its threaded one (a thread is a rank)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of many: what is built is real, what is communicated is not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def counted_new_groups() -> Iterator[list[int]]:
    """Number of ranks of every group that is asked for, one entry a ``new_group`` call."""
    from torch.distributed import device_mesh, distributed_c10d

    sizes: list[int] = []
    right = distributed_c10d.new_group

    def counted(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        sizes.append(dist.get_world_size() if ranks is None else len(ranks))
        return right(ranks, *args, **kwargs)

    places = [place for place in (dist, distributed_c10d, device_mesh) if getattr(place, "new_group", None) is right]
    for place in places:
        place.new_group = counted  # type: ignore[attr-defined]
    try:
        yield sizes
    finally:
        for place in places:
            place.new_group = right  # type: ignore[attr-defined]


def threaded_ranks(function: Callable[[int], Any], world_size: int, timeout: float) -> list[Any]:
    """``function(rank)`` in a thread a rank, with collectives that compute; what each returned.

    It leaves its process changed: give it a process of its own.

    Raises:
        RuntimeError: a rank raised (the first rank's error is the cause) or had not finished in time.
    """
    from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, _install_threaded_pg

    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # group names are a thread's own
    _install_threaded_pg()
    store, results, errors = dist.HashStore(), {}, {}

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001  (raised again below)
            errors[rank] = error
            ProcessLocalGroup.exception_handle(error)  # the others must not wait for this one

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:
        rank = min(errors)
        raise RuntimeError(f"rank {rank} of {world_size}: {errors[rank]}") from errors[rank]
    if len(results) < world_size:
        raise RuntimeError(f"{world_size - len(results)} of {world_size} ranks had not finished in {timeout} s.")
    return [results[rank] for rank in range(world_size)]
