"""Files of a folder that others made: plain names inside it, no link that leads out; and folders that are our own.

A snapshot in the Hub's cache is made of links into ``blobs`` beside it: these are the ones that may lead out.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from hf_fsdpturbo.bounded import cut

READ = (".json", ".safetensors", ".bin", ".pt", ".pth", ".distcp", ".metadata", ".jinja", ".model", ".txt")
"""Endings of files that loading, resuming and exporting read; links of other names are nobody's business."""


def is_plain_name(name: Any) -> bool:
    """Whether an index may name this as a file: one that lies beside it."""
    return isinstance(name, str) and name not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\")


def path_inside(folder: str, name: str, named_by: str) -> str:
    """``folder/name``, which a file of that folder names.

    Args:
        folder: of the checkpoint.
        name: as it is written there.
        named_by: the file that names it, for the message.

    Raises:
        ValueError: not a plain name inside the folder, or a link that leads out of it.
    """
    if not all(map(is_plain_name, name.replace("\\", "/").split("/"))):
        raise ValueError(
            f"{named_by} names the file {cut(name)}, but only plain names inside its folder are read. Copy the "
            "checkpoint again, from where you trust it."
        )
    path = os.path.join(folder, name)
    check_link(folder, path)
    return path


def check_link(folder: str, path: str) -> None:
    """Refuse a link that leads out of the folder; a file that is missing is no concern here.

    Raises:
        ValueError: naming the link and where it leads.
    """
    inner = os.path.relpath(path, folder).split(os.sep)
    steps = [os.path.join(folder, *inner[: length + 1]) for length in range(len(inner))]
    if not any(os.path.islink(step) for step in steps):
        return
    root, target = os.path.realpath(folder), os.path.realpath(path)
    allowed = [root]
    entry, snapshots, commit = root.rpartition(f"{os.sep}snapshots{os.sep}")
    if snapshots and commit:  # of the Hub's cache, or a subfolder there
        allowed.append(os.path.join(entry, "blobs"))
    if not any(target.startswith(top + os.sep) for top in allowed):
        raise ValueError(
            f"{path} is a link to {cut(target)[1:-1]}, outside its folder; such links are not followed. Put the file "
            "itself there, or give the folder it lies in."
        )


def check_links(folder: str) -> None:
    """:func:`check_link` of all files in a folder that are read, and that each is a plain file; one listing.

    Raises:
        ValueError: as there; a pipe or device, which would be read for ever; a link that leads to itself.
    """
    with os.scandir(folder) as entries:
        odd = [entry.path for entry in entries if entry.is_symlink() or not (entry.is_file() or entry.is_dir())]
    for path in sorted(odd):
        if path.endswith(READ) or os.path.isdir(path):
            _check_plain(path)
            check_link(folder, path)


def _check_plain(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return  # who needs the file misses it
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. Copy the file again.") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(f"{path} is a pipe or a device, which would be read for ever. Put a plain file there.")


def check_checkpoint_links(checkpoint: str) -> None:
    """:func:`check_links` of a ``checkpoint-N`` and the shards in it; no folder there is no fault here.

    Raises:
        ValueError: as there.
    """
    for folder in (checkpoint, os.path.join(checkpoint, "dcp")):
        if os.path.isdir(folder):
            check_links(folder)


def own_folder(path: str) -> str:
    """A folder that is ours to fill and empty, which need not exist.

    Raises:
        ValueError: it is a link: what is written into it, or removed, would be elsewhere.
    """
    if os.path.islink(path):
        raise ValueError(
            f"{path} is a link, to {cut(os.path.realpath(path))[1:-1]}; checkpoints are written into and removed from "
            "folders of their own. Remove the link."
        )
    return path
