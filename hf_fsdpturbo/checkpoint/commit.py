"""Whole or not there: a checkpoint is written under another name and appears by one rename, once every rank is done.

    output_dir/
      checkpoint-3/               finished: holds COMPLETE.json, the list of its files, their sizes and checksums
      _saving/<run>/checkpoint-6/ being written, or left by a killed run; the next save removes it
      _deleting/checkpoint-1/     being removed

Names that begin with ``checkpoint-`` would be counted by Transformers; its Hub uploads leave out names with ``_``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from typing import Any

from hf_fsdpturbo.bounded import DATA_BYTES, parse_json, read_text
from hf_fsdpturbo.checkpoint.checksums import checksum
from hf_fsdpturbo.checkpoint.inside import own_folder

logger = logging.getLogger(__name__)

COMPLETE = "COMPLETE.json"
STAGING = "_saving"
DELETING = "_deleting"
_NAME = re.compile(r"checkpoint-(\d+)")
HASHED = (".pt", ".pth", ".bin", "shards.json", "optimizer.json", "topology.json", "trainer_state.json")
"""Files that a resume reads, checksums of which are in the marker. Those of shards and their index are in
``shards.json``, taken as they were written. Weights of the Hub's format have none: a resume does not read them."""

VISIBLE_SECONDS = 20.0


def staging_dir(run_dir: str, run: str = "") -> str:
    """Where checkpoints of ``run_dir`` are written before they are renamed; ``run`` is the run's own name.

    Raises:
        ValueError: it is a link, or the folder of all runs is one.
    """
    folder = own_folder(os.path.join(run_dir, STAGING))
    return own_folder(os.path.join(folder, run)) if run else folder


def final_dir(staged: str) -> str:
    """Where a checkpoint that is being written will be: ``_saving/<run>/<name>`` -> ``<name>`` beside ``_saving``."""
    parent, name = os.path.split(os.path.abspath(staged))
    for folder in (parent, os.path.dirname(parent)):
        if os.path.basename(folder) == STAGING:
            return os.path.join(os.path.dirname(folder), name)
    return staged


def open_staging(run_dir: str, name: str, run: str = "") -> None:
    """Remove what earlier runs left and make ``_saving/<run>/<name>`` anew; one rank does it.

    A checkpoint that was moved aside for its replacement and never replaced (killed in between) goes back first.
    """
    restore_moved_aside(run_dir)
    shutil.rmtree(staging_dir(run_dir), ignore_errors=True)
    shutil.rmtree(own_folder(os.path.join(run_dir, DELETING)), ignore_errors=True)
    os.makedirs(os.path.join(staging_dir(run_dir, run), name))


def wait_visible(path: str) -> None:
    """Wait until this rank sees a folder that another one made.

    Raises:
        ValueError: it does not appear: the ranks do not share a file system.
    """
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not os.path.isdir(path):
        if time.monotonic() > deadline:
            raise ValueError(
                f"output_dir: {path} was made by rank 0 and is not visible here. Checkpoints are written by all "
                "ranks: put output_dir on a file system that all of them share, or set save_on_each_node."
            )
        time.sleep(0.05)


def list_files(directory: str) -> dict[str, int]:
    """Sizes in bytes of all files under a directory by relative path, the marker left out."""
    sizes: dict[str, int] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            sizes[os.path.relpath(path, directory)] = os.path.getsize(path)
    sizes.pop(COMPLETE, None)
    return dict(sorted(sizes.items()))


def commit(run_dir: str, name: str, facts: dict[str, Any], run: str = "") -> str:
    """Mark ``_saving/<run>/<name>`` complete and rename it to ``<run_dir>/<name>``; one rank does it, after all wrote.

    A checkpoint of that name is moved into staging first and removed after, so at no moment are both lost.
    """
    staged, final = os.path.join(staging_dir(run_dir, run), name), os.path.join(run_dir, name)
    sync_tree(staged)
    files = list_files(staged)
    hashes = {name: checksum_of(os.path.join(staged, name)) for name in files if name.endswith(HASHED)}
    write_json(os.path.join(staged, COMPLETE), {**facts, "files": files, "hashes": hashes})
    aside = os.path.join(staging_dir(run_dir, run), f"replaced-{name}")
    if os.path.isdir(final):
        os.rename(final, aside)
    os.rename(staged, final)
    _sync_directory(run_dir)
    shutil.rmtree(staging_dir(run_dir), ignore_errors=True)
    return final


def restore_moved_aside(run_dir: str) -> list[str]:
    """Undo a replacement that was killed between its two renames; names put back."""
    restored = []
    for path in staged_entries(run_dir):
        entry = os.path.basename(path)
        name = entry.removeprefix("replaced-")
        if name != entry and not os.path.exists(os.path.join(run_dir, name)):
            os.rename(path, os.path.join(run_dir, name))
            restored.append(name)
    return restored


def staged_entries(run_dir: str) -> list[str]:
    """Checkpoints in staging, of all runs."""
    found: list[str] = []
    for folder, names, _ in os.walk(staging_dir(run_dir)):
        checkpoints_here = [name for name in names if "checkpoint-" in name]
        found += [os.path.join(folder, name) for name in checkpoints_here]
        names[:] = [name for name in names if name not in checkpoints_here]
    return sorted(found)


def write_json(path: str, content: Any) -> None:
    """Write JSON and force it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_json(path: str) -> Any:
    """Read JSON.

    Raises:
        ValueError: missing, or not JSON; names the file.
    """
    try:
        return parse_json(read_text(path, DATA_BYTES), path)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: copy the whole checkpoint.") from error


def sync_tree(directory: str) -> None:
    """Force all files under a folder, and their names, to disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            _sync_file(os.path.join(folder, name))
        _sync_directory(folder)


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: str) -> None:
    _sync_file(path)  # on POSIX a directory's entries are made durable the same way


def checksum_of(path: str) -> str:
    """Checksum of a whole file."""
    with open(path, "rb") as file:
        return checksum(file.read())


def is_finished(directory: str) -> bool:
    """Whether a checkpoint carries its marker."""
    return os.path.isfile(os.path.join(directory, COMPLETE))


def checkpoints(run_dir: str) -> list[tuple[int, str]]:
    """(step, path) of every directory named ``checkpoint-N``, finished or not, oldest first."""
    names = os.listdir(run_dir) if os.path.isdir(run_dir) else []
    found = [(int(match[1]), os.path.join(run_dir, match[0])) for name in names if (match := _NAME.fullmatch(name))]
    return sorted(entry for entry in found if os.path.isdir(entry[1]))


def last_checkpoint(run_dir: str, taken: Callable[[str], bool] = is_finished) -> tuple[str | None, list[str]]:
    """Newest checkpoint that may be ``taken`` (or None), and what was skipped or left unfinished, in words."""
    notes = [f"{path} was never finished and is ignored" for path in staged_entries(run_dir)]
    for _, path in reversed(checkpoints(run_dir)):
        if taken(path):
            return path, notes
        notes.append(f"{path} has no {COMPLETE} (unfinished, or not written by hf_fsdpturbo) and is skipped")
    return None, notes


def remove(path: str) -> None:
    """Remove a checkpoint so that no half of it is ever taken for a whole: it is renamed first."""
    trash = own_folder(os.path.join(os.path.dirname(path), DELETING))
    os.makedirs(trash, exist_ok=True)
    target = os.path.join(trash, f"{os.path.basename(path)}-{time.monotonic_ns()}")
    os.rename(path, target)
    shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(trash, ignore_errors=True)


def rotate(run_dir: str, limit: int | None, best: str | None, new: str | None = None) -> None:
    """Remove finished checkpoints beyond ``limit``, those of the lowest steps first; the new and the best stay.

    Args:
        new: the one just made, which is not that of the highest step in a run that was resumed from an earlier one or
            started again in the same folder; by default that of the highest step.
    """
    if limit is None or limit <= 0:
        return
    finished = [path for _, path in checkpoints(run_dir) if is_finished(path)]
    kept = [*([new] if new else finished[-1:]), *([best] if best else [])]
    keep = {os.path.abspath(path) for path in kept}
    excess = len(finished) - max(limit, len(keep & {os.path.abspath(path) for path in finished}))
    for path in finished:
        if excess > 0 and os.path.abspath(path) not in keep:
            remove(path)
            excess -= 1
