"""Codes and scales of a release, paired by key and compared by shape: its headers as if it were stored in full."""

from __future__ import annotations

import math
import os
from typing import Any, NoReturn

from hf_fsdpturbo.bounded import cut
from hf_fsdpturbo.quantised.block_scales import GROUP, Packed
from hf_fsdpturbo.quantised.methods import PackedAs

Headers = dict[str, dict[str, Any]]
FLOAT8 = ("F8_E4M3", "F8_E5M2")
SCALES = (".weight_scale_inv", ".scale", ".qscale_weight")
"""Ends of the key of a weight's scales, in place of ``.weight``; of a stack without that end: ``_scale_inv``."""
OF_ACTIVATIONS = (".activation_scale", ".input_scale")
"""Scales of what a packed layer is given; in full it needs none."""
FLOATS = ("F32", "F16", "BF16")
MXFP4 = ("_blocks", "_scales")


class _Held:
    """The tensors of a release: where they lie, what their headers say.

    Args:
        folder: for messages.
        headers: of all files.
    """

    def __init__(self, folder: str, headers: Headers) -> None:
        self.folder = folder
        self.files = {key: file for file, header in headers.items() for key in header}
        self.entries = {key: entry for header in headers.values() for key, entry in header.items()}

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.entries[key]["shape"])

    def dtype(self, key: str) -> str:
        return str(self.entries[key]["dtype"])

    def size(self, *keys: str) -> int:
        """Bytes on disk."""
        return sum(math.prod(self.shape(key)) * bytes_of(self.dtype(key)) for key in keys)

    def refuse(self, key: str, why: str) -> NoReturn:
        file = os.path.join(self.folder, self.files[key])
        raise ValueError(f"{file}: {cut(key)[1:-1]} {why} Use the release's own files and config.json.")


def bytes_of(dtype: str) -> int:
    """Bytes of an element of a safetensors dtype, at least one."""
    digits = "".join(character for character in dtype.partition("_")[0] if character.isdigit())
    return max(int(digits or 8) // 8, 1)


def paired(folder: str, headers: Headers, packed_as: PackedAs) -> Headers:
    """Headers of a packed release as if its weights were stored in full.

    A packed weight has the key and shape that it has in full, and ``"packed"`` (a :class:`Packed`) beside; its scales
    have none. Whatever is stored in full stays.

    Args:
        folder: for messages.
        headers: of all files.
        packed_as: what its config says.

    Raises:
        ValueError: codes without scales, scales without codes, shapes or dtypes that do not belong together; names
            file and key.
    """
    held = _Held(folder, headers)
    found = _mxfp4(held) if packed_as.method == "mxfp4" else _float8(held, packed_as)
    hidden = {packed.scale[1] for packed in found.values()} | {packed.weight[1] for packed in found.values()}
    hidden |= {name.removesuffix(".weight") + end for name in found for end in OF_ACTIVATIONS}
    in_full: Headers = {
        file: {key: entry for key, entry in header.items() if key not in hidden} for file, header in headers.items()
    }
    for name, packed in found.items():
        entry = {"dtype": "F32", "shape": list(packed.full_shape), "packed": packed}
        in_full[packed.weight[0]][name] = entry
    return in_full


def _mxfp4(held: _Held) -> dict[str, Packed]:
    codes_end, scales_end = MXFP4
    found = {}
    for key in held.entries:
        if key.endswith(scales_end) and key.removesuffix(scales_end) + codes_end not in held.entries:
            held.refuse(key, f"are scales without codes: there is no {key.removesuffix(scales_end) + codes_end}.")
        if not key.endswith(codes_end):
            continue
        name = key.removesuffix(codes_end)
        scales = name + scales_end
        if scales not in held.entries:
            held.refuse(key, f"has no scales: there is no {scales}.")
        shape, grid = held.shape(key), held.shape(scales)
        if held.dtype(key) != "U8" or held.dtype(scales) != "U8":
            held.refuse(key, f"and its scales have dtypes {held.dtype(key)} and {held.dtype(scales)}, not U8 both.")
        if len(shape) != 4 or 2 * shape[3] != GROUP or grid != shape[:3]:
            held.refuse(
                key, f"has shape {shape} and its scales {grid}: MXFP4 is [E, R, C/32, 16] with scales [E, R, C/32]."
            )
        whole = (*shape[:2], shape[2] * GROUP)
        places = (held.files[key], key), (held.files[scales], scales)
        found[name] = Packed(*places, whole, grid, (1, GROUP), "mxfp4", held.size(key, scales))
    return found


def _float8(held: _Held, packed_as: PackedAs) -> dict[str, Packed]:
    found = {}
    for key in held.entries:
        scales = _scales_of(held, key)
        if scales is None:
            if _is_packed(held, key):
                held.refuse(key, f"has dtype {held.dtype(key)} and no scales: there is no {_scales_names(key)[0]}.")
            continue
        shape, grid, is_half = held.shape(key), held.shape(scales), held.dtype(key) == "I8"
        if not is_half and held.dtype(key) not in (*FLOAT8, *FLOATS):
            held.refuse(key, f"has dtype {held.dtype(key)}: numbers of 8 bits are {', '.join(FLOAT8)}.")
        if held.dtype(scales) not in (*FLOATS, "F8_E8M0", "U8"):
            held.refuse(scales, f"has dtype {held.dtype(scales)}, which no scales have.")
        whole = (*shape[:-1], 2 * shape[-1]) if is_half else shape
        block = _block(held, key, scales, whole, grid, packed_as)
        places = (held.files[key], key), (held.files[scales], scales)
        found[key] = Packed(*places, whole, grid, block, "half" if is_half else "float8", held.size(key, scales))
    taken = {packed.scale[1] for packed in found.values()}
    for key in held.entries:
        if key.endswith(("weight_scale_inv", "_scale_inv")) and key not in taken:
            held.refuse(key, "are scales without a weight.")
    return found


def _is_packed(held: _Held, key: str) -> bool:
    """Whether a tensor is of a dtype that means nothing without scales."""
    dtype = held.dtype(key)
    return (
        (dtype.startswith(("F8", "F6", "F4")) or dtype in ("I8", "U8"))
        and len(held.shape(key)) > 1
        and (not key.endswith((*SCALES, "_scale_inv")))
    )


def _scales_names(key: str) -> list[str]:
    base = key.removesuffix(".weight")
    return [base + end for end in SCALES] if base != key else [f"{key}_scale_inv"]


def _scales_of(held: _Held, key: str) -> str | None:
    return next((name for name in _scales_names(key) if name in held.entries), None)


def _block(
    held: _Held, key: str, scales: str, shape: tuple[int, ...], grid: tuple[int, ...], packed_as: PackedAs
) -> tuple[int, int]:
    """Rows and columns that share a scale: the config's, of which the last may be cut, or else equal parts."""
    if len(shape) < 2:
        held.refuse(key, f"has shape {shape}, and only matrices are packed.")
    whole = (shape[-2], shape[-1])
    if len(grid) < 2 and math.prod(grid) == 1:
        return whole
    if len(grid) == len(shape) and grid[:-2] == shape[:-2] and min(grid) > 0:
        named = packed_as.block
        if named is not None and all(
            -(-size // part) == n for size, part, n in zip(whole, named, grid[-2:], strict=True)
        ):
            return named
        if all(size % n == 0 for size, n in zip(whole, grid[-2:], strict=True)):
            return whole[0] // grid[-2], whole[1] // grid[-1]
    named_in_words = (
        "no weight_block_size" if packed_as.block is None else f"weight_block_size={list(packed_as.block)}"
    )
    held.refuse(
        key,
        f"has shape {shape} and its scales {scales} {grid}: these are neither the blocks of the config "
        f"({named_in_words}) nor equal parts.",
    )
