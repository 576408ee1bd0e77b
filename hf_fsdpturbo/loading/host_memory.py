"""Host memory that is freed goes back to the system at once while a checkpoint is read."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Iterator

from hf_fsdpturbo import launch_config

# Note [Freed pieces that stay]
# Reading per-expert tensors makes and frees thousands of pieces of a few MiB. glibc first maps such blocks one by one,
# then, having seen one freed, raises the size from which it does so, up to 32 MiB: later pieces come from its heaps,
# stacked tensors are put between them, and the holes stay resident. Measured on a shard of 602 MiB: a peak of 920 MiB,
# still 920 afterwards; with the size fixed at 256 KiB, 615 and 610 (benchmarks/loading_memory.py).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
WHILE_READING = 256 * 2**10
AFTERWARDS = 32 * 2**20  # where glibc's own adjustment ends up


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """While open, blocks above 256 KiB are mappings of their own; see Note [Freed pieces that stay].

    Does nothing where the C library is not glibc, or where the user has set ``MALLOC_MMAP_THRESHOLD_``.
    """
    if platform.libc_ver()[0] != "glibc" or launch_config.variable("MALLOC_MMAP_THRESHOLD_") is not None:
        yield
        return
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, WHILE_READING)
    try:
        yield
    finally:
        library.mallopt(M_MMAP_THRESHOLD, AFTERWARDS)
        library.mallopt(M_TRIM_THRESHOLD, 2 * AFTERWARDS)
