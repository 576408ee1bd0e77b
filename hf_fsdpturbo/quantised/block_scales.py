"""Numbers of 8 and 4 bits with a scale a block: any part of a tensor in full, by the rules of Transformers.

R, C rows and columns of a matrix as it is packed; M, N rows and columns that share a scale.

    codes  [..., R, C]      float8, or two e2m1 numbers a byte, the low half first
    scales [..., R/M, C/N]  float32, bfloat16, float16; or a power of two, one byte (ue8m0)
    value = code * scale, in float32, rounded once to the dtype that is asked for

Each value needs its own code and scale only, so a part has the bits of the whole's part, wherever it is cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of a half byte (sign, two bits of exponent, one of mantissa); OCP Microscaling Formats 1.0, section 5.3.3."""
GROUP = 32
"""Numbers that share a scale in MXFP4."""
AT_ONCE = 2**20
"""Elements in float32 at a time."""

Read = Callable[[str, str, tuple[slice, ...]], Tensor]
"""``read(file, key, index)``: a part of a tensor as it is stored."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """One packed tensor of a checkpoint.

    Attributes:
        weight: file and key of the codes.
        scale: file and key of the scales.
        shape: of the values as they lie packed, ``[..., R, C]``.
        grid: of the scales, ``[..., R/M, C/N]``.
        block: M and N.
        code: "float8"; "half" (two numbers a byte along C); "mxfp4" (half bytes in groups, ``[..., R, C/32, 16]``).
        size: bytes on disk, codes and scales.
    """

    weight: tuple[str, str]
    scale: tuple[str, str]
    shape: Shape
    grid: Shape
    block: tuple[int, int]
    code: str
    size: int

    @property
    def is_transposed(self) -> bool:
        """Whether the model's parameter has C before R: gpt-oss multiplies from the other side."""
        return self.code == "mxfp4"

    @property
    def full_shape(self) -> Shape:
        """Shape of the values as the model has them."""
        *lead, rows, columns = self.shape
        return (*lead, columns, rows) if self.is_transposed else self.shape


def in_full(packed: Packed, read: Read, index: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
    """A part of the values, made a few rows at a time.

    Args:
        packed: the tensor.
        read: reads codes and scales.
        index: of the part in ``packed.full_shape``; slices without steps, dims at the end may be left out.
        dtype: of the result.

    Returns:
        the part, contiguous, on the CPU.
    """
    index = (*index, *(slice(None),) * (len(packed.shape) - len(index)))
    spans = [part.indices(size)[:2] for part, size in zip(index, packed.full_shape, strict=True)]
    out = torch.empty([max(stop - start, 0) for start, stop in spans], dtype=dtype)
    if packed.is_transposed:
        spans = [*spans[:-2], spans[-1], spans[-2]]
    filled = out.transpose(-1, -2) if packed.is_transposed else out
    *lead, (top, bottom), columns = spans
    if out.numel() == 0:
        return out
    step = packed.block[0]
    step *= max(AT_ONCE // max(columns[1] - columns[0], 1) // step, 1)
    for place in itertools.product(*(range(start, stop) for start, stop in lead)):
        into = filled[tuple(at - start for at, (start, _) in zip(place, lead, strict=True))]
        for row in range(top, bottom, step):
            rows = (row, min(row + step, bottom))
            into[row - top : rows[1] - top] = _values(packed, read, place, rows, columns)
    return out


def _values(
    packed: Packed, read: Read, place: tuple[int, ...], rows: tuple[int, int], columns: tuple[int, int]
) -> Tensor:
    """Rows and columns of one matrix, float32."""
    at = tuple(slice(number, number + 1) for number in place)
    codes = _codes(packed, read, at, rows, columns)
    spans = list(zip((rows, columns), packed.block, strict=True))
    shared = [(start // size, -(-stop // size)) for (start, stop), size in spans]
    held = () if len(packed.grid) < 2 else (*at, *(slice(*span) for span in shared))  # one scale for the whole
    scales = _scales(read(*packed.scale, held), packed.code).reshape([_size(span) for span in shared])
    for dim, (span, size) in enumerate(spans):
        scales = scales.index_select(dim, torch.arange(*span) // size - shared[dim][0])
    return codes.mul_(scales) if packed.code != "mxfp4" else torch.ldexp(codes, scales, out=codes)


def _codes(
    packed: Packed, read: Read, at: tuple[slice, ...], rows: tuple[int, int], columns: tuple[int, int]
) -> Tensor:
    """The codes as numbers, float32."""
    if packed.code == "float8":
        return read(*packed.weight, (*at, slice(*rows), slice(*columns))).to(torch.float32).reshape(_size(rows), -1)
    width = GROUP if packed.code == "mxfp4" else 2
    first, last = columns[0] // width, -(-columns[1] // width)
    codes = read(*packed.weight, (*at, slice(*rows), slice(first, last)))
    numbers = half_bytes(codes.reshape(_size(rows), -1))
    return numbers[:, columns[0] - first * width :][:, : _size(columns)].contiguous()


def _size(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def half_bytes(codes: Tensor) -> Tensor:
    """Two e2m1 numbers a byte, the low half first.

    Args:
        codes: ``[..., n]``, one byte each.

    Returns:
        ``[..., 2n]``, float32.
    """
    table = torch.tensor(E2M1)
    codes = codes.contiguous().view(torch.uint8)
    halves = torch.stack([table[(codes & 15).int()], table[(codes >> 4).int()]], dim=-1)
    return halves.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _scales(stored: Tensor, code: str) -> Tensor:
    """Scales as float32, of MXFP4 as exponents of two; a byte is a power of two with bias 127.

    Each as Transformers has it: they differ in what a byte of 255 gives.
    """
    if code == "mxfp4":
        return stored.to(torch.int32) - 127
    if stored.dtype == torch.uint8:
        return (stored.to(torch.float32) - 127).exp2()
    return stored.to(torch.float32)
