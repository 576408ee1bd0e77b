"""Keys of a checkpoint that the model class has no place for: listed once, then carried into exports or dropped."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, cast

from torch import nn

from hf_fsdpturbo.checkpoint import unused
from hf_fsdpturbo.loading.heads import REPLACED_HEADS
from hf_fsdpturbo.loading.open_files import Headers
from hf_fsdpturbo.loading.packed_release import carried_in_full, packed_of
from hf_fsdpturbo.ranks import rank

FEW = 6
"""Parts of the model that the listing shows."""
_listed: set[tuple[str, ...]] = set()
"""What was listed by this process: a reload of the best checkpoint, or a reference model, says nothing new."""


def settle_unused(
    path: str, model: nn.Module, folder: str, headers: Headers, keys: list[str], *, fresh_head: bool, drop: bool
) -> None:
    """Remember (on rank 0, which copies it) what exports will carry, and say what that is, once.

    Args:
        path: of the checkpoint, as the user gave it.
        model: loaded.
        folder: where the checkpoint's files are.
        headers: of its safetensors files.
        keys: that belong to no parameter or buffer of the model.
        fresh_head: a task head was drawn; the checkpoint's own head, whose place it takes, is not carried.
        drop: leave them out, and mend the config.
    """
    left = {key for key in keys if not (fresh_head and key.startswith(REPLACED_HEADS))}
    mended = unused.mend_config(cast(Any, model).config) if drop else []
    if rank() != 0:
        return
    files = [os.path.join(folder, file) for file, header in headers.items() if not left.isdisjoint(header)]
    packed = {name: tensor for name, tensor in packed_of(headers).items() if name in left}
    found = unused.find(files, left | {tensor.weight[1] for tensor in packed.values()})
    found = carried_in_full(found, folder, packed)
    if drop or found:
        unused.remember(model, [] if drop else found)
    listing = (type(model).__name__, *sorted(left))
    if listing in _listed or not (found or mended):
        return
    _listed.add(listing)
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
