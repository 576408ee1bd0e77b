"""Whether a finished checkpoint is as it was written: every file there, of its size, with its checksum."""

from __future__ import annotations

import os
import stat
from typing import Any

from hf_fsdpturbo.checkpoint.commit import COMPLETE, checksum_of, is_finished, read_json
from hf_fsdpturbo.ranks import FAILURES, from_rank0, rank

CHECKED_SIZES = (".distcp", ".metadata", ".safetensors", ".pt", ".pth", ".bin")
"""Files that nobody edits by hand: their sizes must be those recorded. Of others (JSON, text) only presence counts."""
_RANDOM_STATE = "rng_state_"


def check(directory: str, checksums: bool = True) -> dict[str, Any]:
    """Check a checkpoint against its marker; returns the marker's facts.

    Args:
        directory: ``checkpoint-N``.
        checksums: compare also those in the marker, but for other ranks' random states: each rank compares its own.

    Raises:
        ValueError: no such directory, no marker, a file missing, of another size or changed; names the file.
    """
    if not os.path.isdir(directory):
        raise ValueError(f"resume_from_checkpoint: {directory} is not a directory. Give a checkpoint-N directory.")
    if not is_finished(directory):
        raise ValueError(
            f"resume_from_checkpoint: {directory} has no {COMPLETE}: it was not finished, or not written by "
            "hf_fsdpturbo. Choose another checkpoint; weights of other origin are given as the model's path."
        )
    facts = _marker(os.path.join(directory, COMPLETE))
    for name, size in facts["files"].items():
        others = name.startswith(_RANDOM_STATE) and name != _own_random_state()
        _check_file(directory, name, size, None if others or not checksums else facts["hashes"].get(name))
    return facts


def _own_random_state() -> str:
    return f"{_RANDOM_STATE}{rank()}.pth"


def _marker(path: str) -> dict[str, Any]:
    """The marker's facts; one that was written before there were checksums has none."""
    facts = read_json(path)
    facts = {"hashes": {}, **facts} if isinstance(facts, dict) else {}
    tables = [facts.get("files"), facts.get("hashes")]
    if not all(isinstance(table, dict) and all(_is_inside(name) for name in table) for table in tables):
        raise ValueError(f"{path} is damaged: it lists no files. Copy the file again, or choose another checkpoint.")
    return facts


def _is_inside(name: str) -> bool:
    """Whether a relative path stays in its directory."""
    return not os.path.isabs(name) and os.pardir not in name.split(os.sep)


def _check_file(directory: str, name: str, size: int, known: str | None) -> None:
    """Raise ValueError unless the file is there with the size, and the checksum, on record."""
    path = os.path.join(directory, name)
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        found = None
    if found is None or not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is missing from the checkpoint. Copy the whole checkpoint, or choose another.")
    if found.st_size != size and name.endswith(CHECKED_SIZES):
        raise ValueError(
            f"{path} has {found.st_size} bytes where {size} were written: it is truncated or replaced. Copy it again, "
            "or choose another checkpoint."
        )
    if known is not None and checksum_of(path) != known:
        raise ValueError(
            f"{path} is not what was written: it is damaged, or of another checkpoint. Copy it again, choose another "
            "checkpoint, or set verify_checkpoint: false if it was changed on purpose."
        )


def fault_in(directory: str, checksums: bool = True) -> BaseException | None:
    """What is wrong with a checkpoint, to be raised by each rank inside ``ranks.together``. Collective.

    Rank 0 looks and tells all: were every rank to look, the file system would be asked for every rank's files by each
    rank, 4 million times at 1,024. What only another node's disk has lost is found by the rank that reads it; of these
    files only its random state would be passed over in silence when missing, so each rank looks for its own.
    """
    fault: BaseException | None = None
    random_states: dict[str, tuple[int, str | None]] = {}
    try:
        if rank() == 0:
            marker = check(directory, checksums)
            hashes = marker["hashes"] if checksums else {}
            random_states = {
                name: (size, hashes.get(name))
                for name, size in marker["files"].items()
                if name.startswith(_RANDOM_STATE)
            }
    except FAILURES as caught:
        fault = caught
    fault, random_states = from_rank0((fault, random_states))
    own = _own_random_state()
    try:
        if fault is None and rank() != 0 and own in random_states:
            _check_file(directory, own, *random_states[own])
    except FAILURES as caught:
        fault = caught
    return fault
