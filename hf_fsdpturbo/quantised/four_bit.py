"""bitsandbytes' 4-bit numbers, and the only place that imports it: blocks of 64 elements and the largest of each.

B blocks of a row, M matrices, n blocks of a matrix. A block never leaves its row, so whoever holds part of the rows,
or whole blocks of each, holds what quantising the whole matrix would have given it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 64
"""Elements that share a largest absolute value: what ``BitsAndBytesConfig`` has, without a field for it."""
TYPES = ("nf4", "fp4")
NESTED_BLOCK = 256
"""Largest values that are quantised together where they are themselves (``bnb_4bit_use_double_quant``)."""
_AT_ONCE = 2**30
"""Elements of one call: kernels count them in 32 bits."""


def _functional() -> Any:
    import bitsandbytes.functional as functional

    return functional


def pack(weight: Tensor, quant_type: str) -> tuple[Tensor, Tensor]:
    """Quantise ``[..., 64 B]``, float32, bfloat16 or float16.

    Returns:
        ``[..., B, 32]`` uint8, two elements a byte; ``[..., B]`` float32, the largest absolute value of each block.
    """
    lead, blocks = weight.shape[:-1], weight.shape[-1] // BLOCK
    if not weight.numel():
        return weight.new_empty((*lead, blocks, 32), dtype=torch.uint8), weight.new_empty((*lead, blocks)).float()
    packed, largest = [], []
    for part in weight.contiguous().view(-1, BLOCK).split(_AT_ONCE // BLOCK):
        data, state = _functional().quantize_4bit(part, blocksize=BLOCK, quant_type=quant_type)
        packed.append(data.view(-1, BLOCK // 2))
        largest.append(state.absmax)
    return torch.cat(packed).view(*lead, blocks, BLOCK // 2), torch.cat(largest).view(*lead, blocks)


def unpack_(out: Tensor, packed: Tensor, largest: Tensor, quant_type: str) -> None:
    """Write the values of :func:`pack` into ``out [..., 64 B]`` (contiguous), rounded once to its dtype."""
    if not out.numel():
        return
    size = _AT_ONCE // BLOCK if out.device.type == "cuda" else 2**16  # elsewhere a second copy of as much is made
    parts = (t.contiguous().view(-1, width).split(size) for t, width in ((out, BLOCK), (packed, BLOCK // 2)))
    for values, data, scale in zip(*parts, largest.contiguous().view(-1).split(size), strict=True):
        flat, options = data.reshape(-1, 1), {"absmax": scale, "blocksize": BLOCK, "quant_type": quant_type}
        if out.device.type == "cuda":
            _functional().dequantize_4bit(flat, out=values, **options)
        else:  # bitsandbytes writes into a given tensor on accelerators only
            values.copy_(_unpacked(flat, scale, quant_type, values))


def _unpacked(flat: Tensor, scale: Tensor, quant_type: str, like: Tensor) -> Tensor:
    functional = _functional()
    state = functional.QuantState(
        absmax=scale, shape=like.shape, dtype=like.dtype, blocksize=BLOCK, quant_type=quant_type
    )
    found: Tensor = functional.dequantize_4bit(flat, state)
    return found.view(like.shape)


@cache
def _nested_code(device: torch.device) -> Tensor:
    code: Tensor = _functional().create_dynamic_map().to(device)
    return code


def nest(largest_Mn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise the largest values of each matrix for itself, as bitsandbytes' double quantisation does.

    Returns:
        ``[M, n']`` uint8, n' being n rounded up to whole blocks of 256; ``[M, n' / 256]`` float32; ``[M, 1]`` float32,
        the mean that was taken off first.
    """
    mean_M1 = torch.stack([row.mean() for row in largest_Mn]).unsqueeze(1)
    padding = -largest_Mn.shape[1] % NESTED_BLOCK
    padded = torch.nn.functional.pad(largest_Mn - mean_M1, (0, padding))
    code = _nested_code(largest_Mn.device)
    bytes_, state = _functional().quantize_blockwise(padded.contiguous(), code=code, blocksize=NESTED_BLOCK)
    return bytes_.view(padded.shape), state.absmax.view(len(padded), -1), mean_M1


def unnest(bytes_Mn: Tensor, scale: Tensor, mean_M1: Tensor, count: int) -> Tensor:
    """The largest values ``[M, count]`` float32 of what :func:`nest` gave."""
    functional, code = _functional(), _nested_code(bytes_Mn.device)
    flat = functional.dequantize_blockwise(
        bytes_Mn.view(-1), absmax=scale.reshape(-1), code=code, blocksize=NESTED_BLOCK
    )
    found: Tensor = flat.view(bytes_Mn.shape)[:, :count] + mean_M1
    return found
