"""Two ranks that go from a collective straight to their end, with gloo's worker threads kept slow on purpose.

``python -m tests.support.gloo_exit PAIRS`` prints how many of 2 * PAIRS processes ended well, and how many of as many
that registered `compat.let_gloo_finish_at_exit`. See Note [Leaving gloo] there.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hf_fsdpturbo import compat


def schedule_workers(policy: int) -> None:
    """Every thread but this one gets ``policy``."""
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread != os.getpid():
            os.sched_setscheduler(thread, policy, os.sched_param(0))


def collectives() -> None:
    """The tensors die with this frame, so that a worker may be the last to hold one."""
    for _ in range(3):
        dist.all_reduce(torch.ones(4))


def rank_main(rank: int, store: str, finish: bool) -> None:
    if finish:
        compat.let_gloo_finish_at_exit()
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})  # main thread and workers share a core
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    collectives()
    schedule_workers(os.SCHED_IDLE)
    if finish:  # a real worker is not starved; without the call even this would save it: it gives the lock away
        atexit.register(schedule_workers, os.SCHED_OTHER)  # runs before what was registered earlier
    sys.setswitchinterval(100)  # seconds: a worker gets the interpreter's lock only where it is given away
    collectives()


def ended_well(pairs: int, finish: bool) -> int:
    """How many of the ranks, all forked from this process, which never does a collective itself."""
    well = 0
    for _ in range(pairs):
        folder = tempfile.mkdtemp()  # not a `with`: a child would leave through it, and deleting files waits
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                rank_main(rank, str(Path(folder, "store")), finish)
                sys.exit(0)
            children.append(child)
        well += sum(os.waitpid(child, 0)[1] == 0 for child in children)
        shutil.rmtree(folder)
    return well


if __name__ == "__main__":
    print(*(ended_well(int(sys.argv[1]), finish) for finish in (False, True)))
