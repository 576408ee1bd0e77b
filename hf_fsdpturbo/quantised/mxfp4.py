"""MXFP4 numbers that are in memory: values of a stack of matrices, on the device where codes and scales are.

L matrices, R rows, B groups of 32 columns: as gpt-oss is released, whose model has the columns before the rows.

    codes_LRBH   uint8 [L, R, B, 16]   two e2m1 numbers a byte, the low half first
    scales_LRB   uint8 [L, R, B]       a power of two with bias 127 (e8m0)

The arithmetic is that of block_scales.py, which reads parts of files.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hf_fsdpturbo.quantised.block_scales import AT_ONCE, GROUP, half_bytes

BYTES = GROUP // 2
_AT_ONCE_ON_DEVICE = 2**24
"""Elements in float32 at a time beside a layer's weights: few kernels, 200 MiB with what goes into them."""


@cache
def _pairs(device: torch.device) -> Tensor:
    """``[256, 2]``: the two numbers of each byte."""
    return half_bytes(torch.arange(256, dtype=torch.uint8)).view(256, 2).to(device)


def unpack_(out_LCR: Tensor, codes_LRBH: Tensor, scales_LRB: Tensor) -> None:
    """Write the values, ``[L, 32 B, R]``: made in float32, rounded once to the dtype of ``out_LCR``.

    Args:
        out_LCR: any float dtype, contiguous or not.
        codes_LRBH: on its device.
        scales_LRB: on its device.
    """
    if not out_LCR.numel():
        return
    matrices, rows, groups, _ = codes_LRBH.shape
    most = AT_ONCE if out_LCR.device.type == "cpu" else _AT_ONCE_ON_DEVICE
    some = max(most // (rows * groups * GROUP), 1)
    part = rows if some > 1 else max(most // (groups * GROUP), 1)
    pairs = _pairs(out_LCR.device)
    for first in range(0, matrices, some):
        for row in range(0, rows, part):
            at = slice(first, first + some), slice(row, row + part)
            values = pairs[codes_LRBH[at].int()].flatten(-2)
            exponents = (scales_LRB[at].int() - 127).unsqueeze(-1)
            torch.ldexp(values, exponents, out=values)
            out_LCR[at[0], :, at[1]].copy_(values.flatten(-2).transpose(-1, -2))
