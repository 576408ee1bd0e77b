"""How large a packed release is on disk, and what it becomes while it loads: one line of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hf_fsdpturbo.quantised.block_scales import GROUP
from hf_fsdpturbo.quantised.methods import PackedAs, packed_as

GIB = 2**30
_SCALE = 4  # bytes of an FP8 release's scale, float32


def storage_note(config: Mapping[str, Any], stacked: Iterable[int], linear: Iterable[int], stored: int) -> str | None:
    """What a plan says of a packed release; None where it is stored in full.

    Args:
        config: the release's fields.
        stacked: elements of each stack of experts.
        linear: elements of each linear layer's weight besides.
        stored: bytes of an element as the run stores it.

    Returns:
        a line; of packed weights that are not dequantised while they load, why.
    """
    try:
        release = packed_as(config, "it")
    except ValueError as error:
        return f"the checkpoint is quantised, and planned as if it were stored in full: {error}"
    if release is None:
        return None
    count = sum(stacked) + (0 if release.method == "mxfp4" else sum(linear))
    return (
        f"the checkpoint is quantised ({release.method}): about {count * packed_bytes(release) / GIB:.1f} GiB of "
        f"packed weights become {count * stored / GIB:.1f} GiB while they load, all ranks "
        "together; each reads its own part"
    )


def packed_bytes(release: PackedAs) -> float:
    """Bytes of a packed element with its share of a scale."""
    if release.method == "mxfp4":
        return 0.5 + 1 / GROUP
    if release.method == "mxfp8":
        return 1 + 1 / GROUP
    return 1 + (_SCALE / (release.block[0] * release.block[1]) if release.block is not None else 0.0)
