"""Reading a DCP directory: its index by one rank a node, of the files each rank opens those with parts of its own.

Nothing is planned together: a rank asks the one that has read the index where its parts lie, and reads them. What it
reads has the checksum that was taken when it was written.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.checkpoint.checksums import HASH
from hf_fsdpturbo.checkpoint.commit import read_json
from hf_fsdpturbo.checkpoint.dcp_index import Place, SavedTensor, read_index
from hf_fsdpturbo.checkpoint.dcp_save import FORMAT, SHARDS_JSON
from hf_fsdpturbo.checkpoint.shard_file import ShardFile
from hf_fsdpturbo.ranks import (
    FAILURES,
    agree,
    everyone_on_node,
    from_node_leader,
    node,
    own_from_node_leader,
    rank,
    together,
)
from hf_fsdpturbo.shards import Box, local_box, local_tensor


class SavedDirectory:
    """A DCP directory that is being read; made and used by all ranks together (collective).

    Args:
        directory: of the shards.
        verify: compare what is read with the checksums that were written, where there are any.

    Attributes:
        tensors: by key; their chunks only on the rank that has read the index.
        proven: whether the directory has checksums.

    Raises:
        CheckpointError: no directory of shards, or a damaged index; on every rank.
    """

    def __init__(self, directory: str, verify: bool = True) -> None:
        self.directory, self.verify = directory, verify
        self._leads = node()[1][0] == rank()
        fault: BaseException | None = None
        told: Any = None
        self._shards: dict[str, Any] | None = None
        self._chunks: dict[str, dict[int, str]] = {}  # file -> start -> checksum
        try:
            if self._leads:
                told = self._read()
        except FAILURES as caught:
            fault = caught
        fault, told = from_node_leader((fault, told))
        with together(f"checking {directory}"):
            if fault is not None:
                raise fault
        if not self._leads:
            shapes, self._shards = told
            self.tensors = {key: SavedTensor(*facts) for key, facts in shapes.items()}
        self.proven = self._shards is not None

    def _read(self) -> Any:
        """Read the index here; what the others are told."""
        path = os.path.join(self.directory, SHARDS_JSON)
        self._shards = _shards(path) if os.path.isfile(path) else None
        proof = self._shards["index"] if self.verify and self._shards is not None else None
        self.tensors = read_index(self.directory, proof)
        # of the checksums, the files' are told with the places in them
        shards = None if self._shards is None else {**self._shards, "files": {}}
        return {key: (tensor.size, tensor.dtype) for key, tensor in self.tensors.items()}, shards

    def read_into(self, state: dict[str, Tensor]) -> None:
        """Fill tensors in place, each rank its own parts. Collective.

        Args:
            state: by key of the directory; each of the shape that was saved, of any dtype.

        Raises:
            CheckpointError: on every rank.
        """
        error: BaseException | None = None
        try:
            self._check(state)
            wanted: dict[str, Box] = {key: local_box(tensor) for key, tensor in state.items()}
        except ValueError as caught:
            error, wanted = caught, {}
        asked = everyone_on_node(wanted)
        answers = [self._answer(boxes) for boxes in asked] if self._leads else None
        places, proofs = own_from_node_leader(answers)
        try:
            if error is None:
                self._fill(state, wanted, places, proofs)
        except FAILURES as caught:
            error = caught
        agree(error, f"reading {self.directory}")

    def _check(self, state: dict[str, Tensor]) -> None:
        for key, tensor in state.items():
            if key not in self.tensors or self.tensors[key].size != tuple(tensor.shape):
                found = self.tensors[key].size if key in self.tensors else "nothing"
                raise ValueError(f"{self.directory} holds {found} of {key}, and {tuple(tensor.shape)} is to be read.")

    def _answer(self, boxes: dict[str, Box]) -> Any:
        """For each key the chunks that overlap with a box, and the checksums of the files' trailers."""
        places = {key: overlapping(self.tensors[key], box) for key, box in boxes.items()}
        names = {place.file for found in places.values() for place in found}
        return places, {name: self._shards["files"].get(name) for name in names} if self._shards else {}

    def _fill(
        self, state: dict[str, Tensor], boxes: dict[str, Box], places: dict[str, list[Place]], proofs: dict[str, Any]
    ) -> None:
        by_file: dict[str, list[tuple[Place, str]]] = {}
        for key, found in places.items():
            for place in found:
                by_file.setdefault(place.file, []).append((place, key))
        for name, asked in sorted(by_file.items()):
            with ShardFile(os.path.join(self.directory, name)) as file:
                known = self._checksums(file, name, proofs)
                for place, key in sorted(asked, key=lambda item: item[0].start):
                    if known is not None and place.start not in known:
                        raise ValueError(f"{file.path} lists no chunk at {place.start}, where the index has {key}.")
                    proof = None if known is None else known[place.start]
                    chunk = file.tensor(place.start, place.length, proof)
                    _copy(state[key], boxes[key], chunk, place, f"{file.path}: {key}")

    def _checksums(self, file: ShardFile, name: str, proofs: dict[str, Any]) -> dict[int, str] | None:
        """Of the chunks of a file, by their first byte; None where they are not asked for."""
        if self._shards is None or not self.verify:
            return None
        if name not in self._chunks:
            if proofs.get(name) is None:
                raise ValueError(f"{file.path} is not in {SHARDS_JSON}. Copy the whole checkpoint, or choose another.")
            listed = file.trailer(self._shards["save_id"], proofs[name])
            self._chunks[name] = {chunk.start: chunk.hash for chunk in listed}
        return self._chunks[name]


def _shards(path: str) -> dict[str, Any]:
    """``shards.json``.

    Raises:
        ValueError: damaged, or of another release; names the file.
    """
    facts = read_json(path)
    whole = isinstance(facts, dict) and isinstance(facts.get("files"), dict)
    if not whole or not {"format", "save_id", "hash", "index"} <= facts.keys():
        raise ValueError(f"{path} is damaged. Copy the file again, or choose another checkpoint.")
    if facts["format"] != FORMAT or facts["hash"] != HASH:
        found = f"format {facts['format']} with {facts['hash']}"
        raise ValueError(f"{path} has {found}, but {FORMAT} with {HASH} is read here: use the release that wrote it.")
    return facts


def overlapping(tensor: SavedTensor, box: Box) -> list[Place]:
    """Chunks with some of a box's elements."""
    if 0 in box.shape:
        return []
    places = tensor.places
    if box.shape:  # chunks are in the order of their first rows
        first = bisect_right(places, box.offset[0] - tensor.tallest, key=lambda place: place.box.offset[0])
        last = bisect_left(places, box.offset[0] + box.shape[0], key=lambda place: place.box.offset[0])
        places = places[first:last]
    return [place for place in places if all(start < stop for start, stop in _common(place.box, box))]


def _common(one: Box, two: Box) -> list[tuple[int, int]]:
    sides = zip(one.offset, one.shape, two.offset, two.shape, strict=True)
    return [(max(a, b), min(a + m, b + n)) for a, m, b, n in sides]


def _copy(target: Tensor, box: Box, chunk: Tensor, place: Place, what: str) -> None:
    """Copy what a chunk has of a rank's box.

    Raises:
        ValueError: the chunk has another shape than the index says.
    """
    if tuple(chunk.shape) != place.box.shape:
        raise ValueError(f"{what} has a chunk of shape {tuple(chunk.shape)} where {place.box.shape} was written.")
    common = _common(place.box, box)
    theirs = tuple(slice(a - start, b - start) for (a, b), start in zip(common, place.box.offset, strict=True))
    ours = tuple(slice(a - start, b - start) for (a, b), start in zip(common, box.offset, strict=True))
    with torch.no_grad():
        local_tensor(target)[ours].copy_(chunk[theirs])
