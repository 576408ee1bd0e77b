"""Tensors of a release that the model class does not use (``mtp.*``, a layer too many): carried into every export.

They are never in memory: rank 0 remembers where their bytes lie and copies them, a chunk at a time. A ``checkpoint-N``
of shards holds them in a file of its own, so that it may be moved to a machine without the release; the second
checkpoint of a run links the file of the first.

Note [where they are read]: from the release, as long as its files are those that were there at the start (size and
time of change). After that from the newest checkpoint. If neither is left, an export is written without them, and that
is said as an error: the trained weights are not lost for them.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from hf_fsdpturbo.checkpoint import commit
from hf_fsdpturbo.ranks import rank

logger = logging.getLogger(__name__)

UNUSED_FILE = "unused.safetensors"
CHUNK_BYTES = 64 * 2**20
CLAIMS: dict[str, Any] = {
    "mtp_num_hidden_layers": 0,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "mtp_layer_types": None,
    "mtp_mlp_layer_types": None,
    "mtp_layers_block_type": None,
    "mtp_local_layer_ids": None,
}
"""Fields with which a config claims such tensors, and what they are without them."""


@dataclass(frozen=True, slots=True)
class Carried:
    """One tensor and where its bytes lie.

    Attributes:
        code: its dtype as safetensors names it (``BF16``).
        path: the file, absolute.
        start: offset in bytes in the file.
        identity: size and time of change of the file when it was found.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    nbytes: int
    path: str
    start: int
    identity: tuple[int, int]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element, at least 1."""
        return max(self.nbytes // max(self.numel, 1), 1)

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """Its bytes piece by piece, each with its offset in the tensor.

        Raises:
            OSError: the file cannot be read or ends too early.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            done = 0
            while done < self.nbytes:
                piece = os.pread(descriptor, min(CHUNK_BYTES, self.nbytes - done), self.start + done)
                if not piece:
                    raise OSError(f"{self.path} ends before {self.name} does.")
                yield done, piece
                done += len(piece)
        finally:
            os.close(descriptor)


@dataclass
class _Remembered:
    """What a model object knows of its release: the tensors, and the newest checkpoint's copy of them."""

    tensors: list[Carried]
    copy: list[Carried] = field(default_factory=list)


def _of(model: nn.Module) -> _Remembered | None:
    return cast("_Remembered | None", getattr(model, "_fsdpturbo_unused", None))


def remember(model: nn.Module, tensors: list[Carried]) -> None:
    """From now on exports of this model carry these tensors; an empty list carries none, whatever is found later."""
    cast(Any, model)._fsdpturbo_unused = _Remembered(tensors)


def find(paths: Iterable[str], names: Iterable[str] | None = None) -> list[Carried]:
    """Tensors of safetensors files, with their places.

    Args:
        paths: files.
        names: which tensors; None: all.

    Raises:
        OSError: a file cannot be read.
    """
    wanted = None if names is None else set(names)
    found = []
    for path in sorted(map(os.path.abspath, paths)):
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__" and (wanted is None or name in wanted):
                start, stop = entry["data_offsets"]
                place = (path, 8 + length + start, _identity(path))
                found.append(Carried(name, entry["dtype"], tuple(entry["shape"]), stop - start, *place))
    return found


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _intact(tensors: list[Carried]) -> bool:
    try:
        return all(_identity(path) == known for path, known in {(tensor.path, tensor.identity) for tensor in tensors})
    except OSError:
        return False


def readable(model: nn.Module) -> list[Carried]:
    """What an export of this model carries, each where it can be read now; see Note [where they are read]."""
    known = _of(model)
    if known is None or _intact(known.tensors):
        return known.tensors if known is not None else []
    if known.copy and _intact(known.copy):
        return known.copy
    logger.error(
        "%d tensors that %s does not use (%s, ...) are no longer where they were at the start, in %s: the export is "
        "written without them. Copy them from the release, or correct what the config says of them.",
        len(known.tensors),
        type(model).__name__,
        known.tensors[0].name,
        os.path.dirname(known.tensors[0].path),
    )
    return []


def settle(model: nn.Module, files: Iterable[str]) -> None:
    """After an export that replaced the very files it read: from now on they are read where they were just written."""
    known = _of(model)
    if known is not None and known.tensors and not _intact(known.tensors):
        moved = find(files, [tensor.name for tensor in known.tensors])
        if len(moved) == len(known.tensors):
            known.tensors = moved


def keep_beside(model: nn.Module, staged: str) -> None:
    """Put them into a checkpoint that is being written (``_saving/checkpoint-N``); one rank does it.

    Raises:
        OSError: the disk is full.
    """
    tensors = readable(model)
    if not tensors:
        return
    known, path = cast(_Remembered, _of(model)), os.path.join(staged, UNUSED_FILE)
    copy = known.copy if known.copy and _intact(known.copy) else []
    if not copy or not _linked(copy[0].path, path):
        write(tensors, path)
    final = os.path.join(commit.final_dir(staged), UNUSED_FILE)
    known.copy = [_at(tensor, final) for tensor in find([path])]


def _at(tensor: Carried, path: str) -> Carried:
    return Carried(tensor.name, tensor.code, tensor.shape, tensor.nbytes, path, tensor.start, tensor.identity)


def _linked(source: str, target: str) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links: the bytes are written again
        return False
    return True


def adopt(model: nn.Module, checkpoint: str) -> None:
    """A model whose release is not known carries what a checkpoint of it holds; a model that carries none stays so.

    Rank 0, which copies, has to know; nothing is done elsewhere.

    Raises:
        OSError: the file cannot be read.
    """
    path = os.path.join(checkpoint, UNUSED_FILE)
    if rank() != 0 or not os.path.isfile(path):
        return
    known = _of(model)
    if known is None:
        held = find([path])
        cast(Any, model)._fsdpturbo_unused = _Remembered(held, copy=held)
    elif known.tensors and not _intact(known.tensors):
        known.copy = find([path])


def write(tensors: list[Carried], path: str) -> None:
    """One safetensors file of them.

    Raises:
        OSError: it cannot be written, or a source cannot be read.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.itemsize)
    with open(path, "wb") as file:
        file.write(header_bytes(ordered))
        for tensor in ordered:
            for _, piece in tensor.chunks():
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def header_bytes(outputs: Iterable[Any]) -> bytes:
    """Header of a safetensors file with tensors in the order of ``outputs``: 8 bytes of length, then padded JSON.

    Args:
        outputs: each with ``name``, ``code``, ``shape`` and ``nbytes``.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for output in outputs:
        offsets = [start, start + output.nbytes]
        entries[output.name] = {"dtype": output.code, "shape": list(output.shape), "data_offsets": offsets}
        start += output.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def mend_config(config: Any) -> list[str]:
    """Make a config, and those inside it, no longer claim such tensors; names of the fields that changed."""
    changed = []
    for name, without in CLAIMS.items():
        if getattr(config, name, None) not in (None, without):
            setattr(config, name, without)
            changed.append(name)
    for name in getattr(config, "sub_configs", None) or ():
        if getattr(config, name, None) is not None:
            changed += [f"{name}.{inner}" for inner in mend_config(getattr(config, name))]
    return changed
