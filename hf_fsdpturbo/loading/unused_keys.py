"""Keys of a checkpoint that the model class has no place for: listed once, then carried into exports or dropped."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, cast

from torch import nn

from hf_fsdpturbo.checkpoint import unused
from hf_fsdpturbo.loading.heads import REPLACED_HEAD
from hf_fsdpturbo.ranks import rank

FEW = 6
"""Parts of the model that the listing shows."""
_listed: set[str] = set()


def settle_unused(
    path: str, model: nn.Module, folder: str, files: Iterable[str], keys: list[str], *, fresh_head: bool, drop: bool
) -> None:
    """Remember what exports will carry, and say on rank 0 what that is, once a checkpoint.

    Args:
        path: of the checkpoint, as the user gave it.
        model: loaded.
        folder: where the checkpoint's files are.
        files: names of its safetensors files.
        keys: that belong to no parameter or buffer of the model.
        fresh_head: a task head was drawn; the checkpoint's own head, whose place it takes, is not carried.
        drop: leave them out, and mend the config.
    """
    left = [key for key in keys if not (fresh_head and key.startswith(REPLACED_HEAD))]
    found = unused.find([os.path.join(folder, file) for file in files], left) if left else []
    if drop or found:
        unused.remember(model, [] if drop else found)
    mended = unused.mend_config(cast(Any, model).config) if drop else []
    if rank() != 0 or path in _listed or not (found or mended):
        return
    _listed.add(path)
    fate = (
        f"left out of everything that is saved{f'; set in the config: {mended}' if mended else ''}"
        if drop
        else "carried into everything that is saved (drop_unused_tensors leaves them out)"
    )
    size = sum(tensor.nbytes for tensor in found)
    parts = by_module(sorted(tensor.name for tensor in found))
    names = ", ".join(f"{name} ({number})" for name, number in list(parts.items())[:FEW])
    more = f" and {len(parts) - FEW} more" if len(parts) > FEW else ""
    print(
        f"[hf_fsdpturbo] {path}: {len(found)} tensors ({size / 1e6:,.1f} MB) are not used by {type(model).__name__}, "
        f"{names}{more}: {fate}.",
        flush=True,
    )


def by_module(keys: Iterable[str]) -> dict[str, int]:
    """Keys in few words: their names as far as the first number, or whole -> how many there are."""
    counted: dict[str, int] = {}
    for key in keys:
        parts = key.split(".")
        numbers = [place for place, part in enumerate(parts) if part.isdigit()]
        name = ".".join([*parts[: numbers[0] + 1], "*"]) if numbers else key
        counted[name] = counted.get(name, 0) + 1
    return counted
