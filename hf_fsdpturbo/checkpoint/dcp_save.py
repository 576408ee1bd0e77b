"""Writing a DCP directory: each rank its own file, then rank 0 the index of them all.

Nothing is planned together: which rank writes what follows from the tensors' own placements. Of what several ranks
hold, one of them writes; where it lies, it writes into its own file's trailer. Rank 0 makes the index of these, and
keeps it: as long as every rank says that all lies where it lay in the last save, no trailer is read.

    dcp/__3_0.distcp    chunks of rank 3 and their checksums: shard_file.py
    dcp/.metadata       DCP's index: dcp_index.py
    dcp/shards.json     id of the save, checksum of the index and of every file's trailer
"""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_fsdpturbo.checkpoint.checksums import HASH, checksum
from hf_fsdpturbo.checkpoint.commit import write_json
from hf_fsdpturbo.checkpoint.dcp_index import METADATA, index_bytes
from hf_fsdpturbo.checkpoint.shard_file import Part, ShardFile, Written, file_name, to_host, write_shard
from hf_fsdpturbo.ranks import FAILURES, agree, everyone, from_rank0, rank, together
from hf_fsdpturbo.shards import local_box, local_tensor

SHARDS_JSON = "shards.json"
FORMAT = 1
WRITERS = 8
"""Ranks that may share the writing of what all hold alike: a rank that resumes opens the file of each."""


def own_parts(state: dict[str, Tensor]) -> list[tuple[Part, Tensor]]:
    """What this rank writes, with its local tensors: they share memory with the state.

    Raises:
        ValueError: a shard that DTensor cannot describe, or a sum that is not added up; names the key.
    """
    return [(_part(key, tensor), local_tensor(tensor)) for key, tensor in state.items() if writes(key, tensor)]


def _part(key: str, tensor: Tensor) -> Part:
    return Part(key, str(tensor.dtype), tuple(tensor.shape), local_box(tensor))


def writes(key: str, tensor: Tensor) -> bool:
    """Whether this rank writes its part of a tensor: one rank of those that hold the same does.

    Plain tensors are the same on all ranks, and rank 0 writes them.
    """
    if not isinstance(tensor, DTensor):
        return rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or not local_tensor(tensor).numel():
        return False
    copy, copies = 0, 1
    for place, size, at in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True):
        if place.is_partial():
            raise ValueError(f"{key} is a sum that is not added up ({tensor.placements}): it cannot be saved.")
        if place.is_replicate():
            copy, copies = copy * size + at, copies * size
    return copy == zlib.crc32(key.encode()) % min(copies, WRITERS)


def new_save_id() -> str:
    """An id that no other save has; rank 0 draws it. Collective."""
    return from_rank0(uuid.uuid4().hex)


def host_parts(state: dict[str, Tensor]) -> list[tuple[Part, Tensor]]:
    """As :func:`own_parts`, copied to host memory: training may go on."""
    parts = own_parts(state)
    return [(part, held.clone() if (held := to_host(t)).data_ptr() == t.data_ptr() else held) for part, t in parts]


def write_own(directory: str, save_id: str, parts: list[tuple[Part, Tensor]]) -> Written:
    """Write this rank's file.

    Raises:
        OSError: it cannot be written.
    """
    os.makedirs(directory, exist_ok=True)
    return write_shard(os.path.join(directory, file_name(rank())), save_id, parts)


class _Index(NamedTuple):
    places: list[str]
    save_id: str
    raw: bytes


_last: _Index | None = None
"""On rank 0: the index of the last save."""


def write_index(directory: str, save_id: str, written: list[Written]) -> None:
    """Write what belongs to all files; one rank does it, once all have written.

    Args:
        written: what each rank says, by rank.

    Raises:
        ValueError: a file is not as its rank says, or the ranks' parts do not make up the tensors.
        OSError: it cannot be written.
    """
    global _last
    places = [of_rank.places for of_rank in written]
    if _last is not None and _last.places == places:
        raw = _last.raw.replace(_last.save_id.encode(), save_id.encode())
    else:
        _last = None  # its memory is needed
        raw = index_bytes(_trailers(directory, save_id, written), save_id)
    _last = _Index(places, save_id, raw)
    with open(os.path.join(directory, METADATA), "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    proofs = {file_name(index): of_rank.trailer for index, of_rank in enumerate(written)}
    facts = {"format": FORMAT, "save_id": save_id, "hash": HASH, "index": checksum(raw), "files": proofs}
    write_json(os.path.join(directory, SHARDS_JSON), facts)


def _trailers(directory: str, save_id: str, written: list[Written]) -> Iterator[tuple[str, Any]]:
    for index, of_rank in enumerate(written):
        with ShardFile(os.path.join(directory, file_name(index))) as file:
            yield file_name(index), file.trailer(save_id, of_rank.trailer)


def save(state: dict[str, Tensor], directory: str) -> None:
    """Write all tensors; collective.

    Raises:
        CheckpointError: on every rank.
    """
    error: BaseException | None = None
    written: Written | None = None
    save_id = new_save_id()
    try:
        written = write_own(directory, save_id, own_parts(state))
    except FAILURES as caught:
        error = caught
    agree(error, f"writing {directory}")
    theirs = everyone(written)
    with together(f"writing {directory}"):
        if rank() == 0:
            write_index(directory, save_id, theirs)
