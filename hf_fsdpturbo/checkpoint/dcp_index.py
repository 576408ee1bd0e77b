"""``.metadata``, the index of a DCP directory: read without running code, checked, and written from what ranks wrote.

It is a pickle of DCP's own classes, which is read with plain stand-ins for them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hf_fsdpturbo.checkpoint import plain_pickle
from hf_fsdpturbo.checkpoint.checksums import checksum
from hf_fsdpturbo.checkpoint.inside import is_plain_name
from hf_fsdpturbo.checkpoint.plain_pickle import shown
from hf_fsdpturbo.checkpoint.shard_file import Chunk
from hf_fsdpturbo.checkpoint.tiling import check_tiles
from hf_fsdpturbo.shards import Box

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one chunk of a tensor lies: its box, file, first byte, number of bytes."""

    box: Box
    file: str
    start: int
    length: int


@dataclass
class SavedTensor:
    """A tensor of a DCP directory: whole shape, dtype, chunks in the order of their first rows, most rows of a chunk.

    Other ranks than the one that has read the index are told no chunks.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    places: list[Place] = field(default_factory=list)
    tallest: int = 0


# Reading


_DCP = "torch.distributed.checkpoint."
_OBJECTS = {
    (f"{_DCP}metadata", name)
    for name in (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
        "TensorStorageMetadata"
    ).split()
} | {(f"{_DCP}filesystem", "_StorageInfo")}
_VALUES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}metadata", "_MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""What ``.metadata`` may name. All else is refused."""


def read_index(directory: str, proof: str | None = None) -> dict[str, SavedTensor]:
    """Tensors of a DCP directory by key.

    Args:
        directory: of the shards.
        proof: checksum that the index must have; None is not asked for.

    Raises:
        ValueError: no index, a damaged one, one that would run code, or chunks that do not make up a tensor; names
            file and key.
    """
    path = os.path.join(directory, METADATA)
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: {directory} is not a DCP directory, or was not finished.") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}): copy the file again.") from error
    if proof is not None and checksum(raw) != proof:
        raise ValueError(f"{path} is not the one that was written. Copy it again, or choose another checkpoint.")
    return parse_index(raw, path, known=proof is not None)


def parse_index(raw: bytes, path: str, *, known: bool = False) -> dict[str, SavedTensor]:
    """The tensors in the bytes of an index; see :func:`read_index`.

    Args:
        raw: the bytes.
        path: of their file, for messages.
        known: they are those that this package wrote.
    """
    try:
        with _no_collection():
            tensors = _tensors(plain_pickle.load(raw, _OBJECTS, _VALUES, known=known))
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{path} cannot be read ({error}): copy the file again.") from error
    for key, tensor in tensors.items():
        try:
            check_tiles(tensor.size, [place.box for place in tensor.places])
        except ValueError as error:
            raise ValueError(f"{path}: {key}: {error}. Copy the checkpoint again, or choose another.") from error
    return tensors


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Millions of objects are made here and none is garbage: looking for some takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _tensors(index: Any) -> dict[str, SavedTensor]:
    """Entries of an index that are tensors, with the places of their chunks.

    Raises:
        ValueError: an entry is not as DCP writes it.
    """
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for position, info in index.get("storage_data").items():
        offset = position.get("offset", None)
        places[position.get("fqn"), () if offset is None else tuple(offset)] = info
    tensors = {}
    for key, entry in index.get("state_dict_metadata").items():
        if not isinstance(key, str):
            raise ValueError(f"an entry is named by {shown(key)}")
        if type(entry).__name__ != "TensorStorageMetadata":
            continue  # bytes of an object: no tensor is made of it
        size, properties = _shape(entry.get("size"), key), entry.get("properties").state
        dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{key} has no dtype")
        boxes = [
            Box(_shape(chunk.get("offsets"), key), _shape(chunk.get("sizes"), key)) for chunk in entry.get("chunks")
        ]
        found = [_place(key, box, places.get((key, box.offset))) for box in boxes]
        tallest = max((box.shape[0] for box in boxes if box.shape), default=0)
        tensors[key] = SavedTensor(size, dtype, sorted(found, key=lambda place: place.box), tallest)
    return tensors


def _shape(values: Any, key: str) -> tuple[int, ...]:
    shape = tuple(values)
    if not all(type(value) is int and 0 <= value < 2**62 for value in shape):
        raise ValueError(f"{key} has a shape of {', '.join(map(shown, shape[:16]))}")
    return shape


def _place(key: str, box: Box, info: Any) -> Place:
    if info is None:
        raise ValueError(f"{key} lacks the place of its chunk at {box.offset}")
    file, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if not is_plain_name(file):
        raise ValueError(f"{key} lies in {shown(file)}, which is no file beside the index")
    if type(start) is not int or type(length) is not int or start < 0 or length < 0:
        raise ValueError(f"{key} lies at {shown(start)} + {shown(length)} of {file}")
    if info.get("transform_descriptors", None):
        raise ValueError(f"{key} is stored transformed, which cannot be undone here")
    return Place(box, file, start, length)


# Writing


def index_bytes(chunks: Iterable[tuple[str, list[Chunk]]], save_id: str) -> bytes:
    """An index as DCP pickles it.

    Args:
        chunks: file name and what lies in it.
        save_id: of the save.

    Raises:
        ValueError: the chunks do not make up the tensors, or ranks disagree on one; names the key.
    """
    with _no_collection():
        return pickle.dumps(_metadata(chunks, save_id))


def _metadata(chunks: Iterable[tuple[str, list[Chunk]]], save_id: str) -> Metadata:
    entries: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file, held in chunks:
        for chunk in held:
            part = chunk.part
            entry = entries.get(part.key)
            if entry is None:
                dtype = getattr(torch, part.dtype.removeprefix("torch."))
                entry = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(part.size), [])
                entries[part.key] = entry
            if tuple(entry.size) != part.size or str(entry.properties.dtype) != part.dtype:
                raise ValueError(f"{part.key} is {part.dtype} {part.size} in {file}, and another tensor elsewhere.")
            offset = torch.Size(part.box.offset)
            storage[MetadataIndex(part.key, offset, len(entry.chunks))] = _StorageInfo(file, chunk.start, chunk.length)
            entry.chunks.append(ChunkStorageMetadata(offset, torch.Size(part.box.shape)))
    for key, entry in entries.items():
        try:
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            check_tiles(tuple(entry.size), boxes)
        except ValueError as error:
            raise ValueError(f"{key}: {error}: the ranks hold other tensors, or one did not write.") from error
    names = {key: (key,) for key in sorted(entries)}
    ordered: Any = {key: entries[key] for key in names}
    return Metadata(ordered, names, storage, StorageMeta(save_id=save_id))
