"""Gradients of a large unit go into FSDP's reduce-scatter buffer by plain copies, not by a table made on the host.

The buffer of W ranks is ``[W, columns]``: row r holds rank r's chunk of every gradient, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

# Note [The table of chunk_cat]
# FSDP fills the buffer with torch._chunk_cat, whose CUDA kernel reads one table entry for every 2 KiB. The host writes
# the table: 0.6 million entries, 7 to 10 ms traced on an H200 host, for the 1.2 GB of an embedding and an LM head, at
# the end of backward where nothing else is queued. A copy is one launch of some microseconds, so copies are used where
# the average one is large. Goes when torch makes the table on the device or a copy per large tensor itself.
LARGE_COPY = 4 * 2**20  # bytes


def copy_in_by_chunk(gradients: list[Tensor], buffer: Tensor, world_size: int) -> None:
    """What ``foreach_reduce_scatter_copy_in`` computes, a copy for each gradient and rank.

    Args:
        gradients: ``[d0, ...]`` each, one dtype; cut in ``world_size`` chunks of ``ceil(d0 / world_size)`` rows, the
            last ones short or empty and filled up with zeros.
        buffer: flat, ``world_size * columns`` elements, any float dtype.
        world_size: ranks of the shard axis.
    """
    rows_WC = buffer.view(world_size, -1)
    start = 0
    for gradient in gradients:
        chunk = -(-gradient.shape[0] // world_size)
        columns = chunk * gradient[:1].numel()
        for rank in range(world_size):
            part = gradient[rank * chunk : (rank + 1) * chunk]
            filled = start + part.numel()
            rows_WC[rank, start:filled].view(part.shape).copy_(part)
            if filled < start + columns:
                rows_WC[rank, filled : start + columns].zero_()
        start += columns


def copy_large_gradients_by_chunk() -> None:
    """Let FSDP units of this process do so where it is faster: see Note [The table of chunk_cat]. Again: no change."""
    original: Callable[..., None] | None = getattr(collectives, "foreach_reduce_scatter_copy_in", None)
    if original is None or hasattr(original, "__wrapped__"):
        return  # another torch release fills its buffer elsewhere: its own way then

    @functools.wraps(original)
    def copy_in(unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int) -> Any:
        copies = len(unsharded_grads) * world_size
        bytes_in = sum(gradient.numel() * gradient.element_size() for gradient in unsharded_grads)
        if bytes_in >= copies * LARGE_COPY and all(gradient.ndim for gradient in unsharded_grads):
            return copy_in_by_chunk(unsharded_grads, reduce_scatter_input, world_size)
        return original(unsharded_grads, reduce_scatter_input, world_size)

    collectives.foreach_reduce_scatter_copy_in = copy_in
