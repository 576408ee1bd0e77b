"""One rank's file of a DCP directory: chunks as ``torch.save`` writes them, then a trailer that lists and proves them.

    chunk | chunk | ... | trailer: compressed JSON | its length, 8 bytes | MAGIC, 8 bytes

The trailer holds a checksum of every chunk, taken while it is written, and the id of the save. DCP's own readers take
a chunk by its place and length and never see the trailer.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from hf_fsdpturbo.checkpoint.checksums import HASH, Checksum, checksum
from hf_fsdpturbo.shards import Box

MAGIC = b"FSDPTRB1"
TRAILER_BYTES = 2**30
"""More is no trailer of ours: 4 million chunks in one file."""
_DAMAGED = (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError)
"""What torch raises of bytes that are no tensor; it names no file."""


def file_name(rank: int) -> str:
    """Name of a rank's file, as DCP names them."""
    return f"__{rank}_0.distcp"


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes of a tensor: its key, dtype (``torch.bfloat16``), whole shape, the box that is written."""

    key: str
    dtype: str
    size: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part in a file: first byte, number of bytes, checksum of these."""

    part: Part
    start: int
    length: int
    hash: str


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank says of its file: checksums of where all lies (equal in every save of a run) and of the trailer."""

    places: str
    trailer: str


class _Hashed:
    """Passes on what is written to it, and takes a checksum on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.state = file, Checksum()

    def write(self, data: Any) -> int:
        self.state.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write_shard(path: str, save_id: str, parts: Iterable[tuple[Part, Tensor]]) -> Written:
    """Write one rank's file and force it to disk.

    Args:
        path: of the file.
        save_id: the same in all files of one save.
        parts: each with its tensor, on any device.

    Raises:
        OSError: the disk is full, or not writable.
    """
    chunks = []
    with open(path, "wb") as file:
        for part, tensor in _on_host(parts):
            chunks.append(_write_chunk(file, part, tensor))
        name = os.path.basename(path)
        entries = [_entry(chunk) for chunk in chunks]
        facts = {"file": name, "save_id": save_id, "hash": HASH, "chunks": entries}
        trailer = zlib.compress(json.dumps(facts, separators=(",", ":")).encode(), 1)
        file.write(trailer + len(trailer).to_bytes(8, "little") + MAGIC)
        file.flush()
        os.fsync(file.fileno())
    places = json.dumps([entry[:-1] for entry in entries], separators=(",", ":"))
    return Written(checksum(places.encode()), checksum(trailer))


def _write_chunk(file: BinaryIO, part: Part, tensor: Tensor) -> Chunk:
    start, stream = file.tell(), _Hashed(file)
    torch.save(tensor, cast(IO[bytes], stream))  # all that it asks for is write and flush
    return Chunk(part, start, file.tell() - start, stream.state.hexdigest())


def _on_host(parts: Iterable[tuple[Part, Tensor]]) -> Iterator[tuple[Part, Tensor]]:
    """The parts in host memory: the next one is copied there while one is written."""
    waiting: tuple[Part, Future[Tensor]] | None = None
    with ThreadPoolExecutor(1, "copy to host") as pool:
        for part, tensor in parts:
            coming = part, pool.submit(to_host, tensor)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = coming
        if waiting is not None:
            yield waiting[0], waiting[1].result()


def to_host(tensor: Tensor) -> Tensor:
    """A tensor in host memory with no more storage than it needs: a view's whole storage would be written with it."""
    host = tensor.detach().cpu().contiguous()
    return host.clone() if host.untyped_storage().nbytes() > host.numel() * host.element_size() else host


def _entry(chunk: Chunk) -> list[Any]:
    part = chunk.part
    place = [part.key, part.dtype, list(part.size), list(part.box.offset), list(part.box.shape)]
    return [*place, chunk.start, chunk.length, chunk.hash]


class ShardFile:
    """A rank's file, open for reading; use as a context.

    Args:
        path: of the file.

    Raises:
        ValueError: it is missing; names the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = open(path, "rb")  # noqa: SIM115  (closed at the end of the context)
        except OSError as error:
            raise ValueError(f"{path} cannot be opened ({error.strerror}). Copy the whole checkpoint.") from error
        self._bytes = os.fstat(self._file.fileno()).st_size

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _fault(self, what: str) -> ValueError:
        return ValueError(f"{self.path} {what}. Copy the file again, or choose another checkpoint.")

    def _read(self, start: int, length: int) -> bytes:
        if start < 0 or length < 0 or start + length > self._bytes:
            raise self._fault(f"has {self._bytes} bytes, but is to be read at {start} + {length}: it is truncated")
        self._file.seek(start)
        data = self._file.read(length)
        if len(data) != length:
            raise self._fault(f"ends at {start + len(data)}, before {start + length}")
        return data

    def trailer(self, save_id: str, proof: str | None) -> list[Chunk]:
        """What the file says it holds.

        Args:
            save_id: that the file must have.
            proof: checksum that the trailer must have; None is not asked for.

        Raises:
            ValueError: no trailer, a damaged one, one of another save or of another file; names the file.
        """
        end = self._read(max(self._bytes - 16, 0), min(16, self._bytes))
        length = int.from_bytes(end[:8], "little")
        if end[8:] != MAGIC or length > min(self._bytes - 16, TRAILER_BYTES):
            raise self._fault("does not end with the list of its chunks: it is damaged or not of this checkpoint")
        packed = self._read(self._bytes - 16 - length, length)
        try:
            facts = json.loads(_unpacked(packed))
            own, name = facts["save_id"], facts["file"]
            chunks = [_chunk(entry) for entry in facts["chunks"]]
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise self._fault(f"has an unreadable list of its chunks ({error})") from error
        if own != save_id:
            raise self._fault(f"is of another save ({str(own)[:32]}, the checkpoint is {save_id})")
        if name != os.path.basename(self.path):
            raise self._fault(f"was written as {str(name)[:64]}")
        if proof is not None and checksum(packed) != proof:
            raise self._fault("has another list of its chunks than was written")
        return chunks

    def tensor(self, start: int, length: int, proof: str | None) -> Tensor:
        """One chunk.

        Args:
            start: its first byte.
            length: number of bytes.
            proof: checksum that these must have; None is not asked for.

        Raises:
            ValueError: the bytes are not there, are others, or are no tensor; names the file.
        """
        data = self._read(start, length)
        if proof is not None and checksum(data) != proof:
            raise self._fault(f"is damaged: {length} bytes at {start} are not those that were written")
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except _DAMAGED as error:
            raise self._fault(f"holds no tensor at {start} ({type(error).__name__}: {str(error)[:200]})") from error
        if not isinstance(tensor, Tensor):
            raise self._fault(f"holds a {type(tensor).__name__} at {start}, not a tensor")
        return tensor


def _unpacked(packed: bytes) -> bytes:
    """Decompressed, up to a size that no trailer has."""
    stream = zlib.decompressobj()
    text = stream.decompress(packed, TRAILER_BYTES)
    if not stream.eof:
        raise ValueError("cut off, or too long")
    return text


def _chunk(entry: Any) -> Chunk:
    key, dtype, size, offset, shape, start, length, proof = entry
    part = Part(str(key), str(dtype), tuple(size), Box(tuple(offset), tuple(shape)))
    return Chunk(part, int(start), int(length), str(proof))
