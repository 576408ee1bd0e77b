"""Chunks that lie on other nodes' own disks, where no disk is common: read by a rank that has the file, and sent.

At the placement that wrote them, that is little: what all ranks hold alike, which one of them wrote.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_fsdpturbo.ranks import FAILURES, everyone, rank

BATCH_BYTES = 64 * 2**20
"""Chunks that are sent at once (at least one)."""


class Chunk(NamedTuple):
    """A stored chunk: where it lies, and the checksum of its file's trailer, where there is one."""

    file: str
    start: int
    length: int
    trailer: str | None


def fetch(directory: str, wanted: list[Chunk], read: Callable[[Chunk], Tensor]) -> dict[tuple[str, int], Tensor]:
    """The wanted chunks by file and start. Collective.

    Args:
        directory: of the shards, on this node's disk.
        wanted: chunks whose files are not there.
        read: one chunk of a file that is.

    Raises:
        ValueError: a file lies on no node; names it, and the hosts and ranks that need it. On every rank.
    """
    asked = everyone((socket.gethostname(), wanted))
    chunks = sorted({chunk for _, theirs in asked for chunk in theirs})
    files = sorted({chunk.file for chunk in chunks})
    held = everyone([name for name in files if os.path.isfile(os.path.join(directory, name))])
    owners = {name: index for index, names in reversed(list(enumerate(held))) for name in names}
    if lost := [name for name in files if name not in owners]:
        needed = [{chunk.file for chunk in theirs} for _, theirs in asked]
        who = [f"rank {i} on {host}" for i, (host, _) in enumerate(asked) if lost[0] in needed[i]]
        raise ValueError(
            f"{os.path.join(directory, lost[0])} lies on no node of this run ({len(lost)} such files), and "
            f"{', '.join(who[:4])} need it. Resume on the nodes that wrote the checkpoint, or copy the file to one."
        )
    mine, received = set(wanted), {}
    for batch in _batches(chunks):
        for chunk, tensor in zip(batch, _sent(batch, owners[batch[0].file], read), strict=True):
            if chunk in mine:
                received[chunk.file, chunk.start] = tensor
    return received


def _batches(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks of one file that are sent together."""
    batch: list[Chunk] = []
    for chunk in chunks:
        full = sum(held.length for held in batch) + chunk.length > BATCH_BYTES
        if batch and (full or batch[0].file != chunk.file):
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch


def _sent(batch: list[Chunk], owner: int, read: Callable[[Chunk], Tensor]) -> list[Tensor]:
    """What the owner reads, on all ranks. Collective; what fails there is raised everywhere."""
    said: list[Any] = [None]
    if rank() == owner:
        try:
            said = [[read(chunk) for chunk in batch]]
        except FAILURES as error:
            said = [f"{type(error).__name__}: {error}"]
    with torch.device("cpu"):
        dist.broadcast_object_list(said, src=owner)
    if isinstance(said[0], str):
        raise ValueError(f"reading {batch[0].file} on rank {owner} failed: {said[0]}")
    tensors: list[Tensor] = said[0]
    return tensors
