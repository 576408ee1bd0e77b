"""AdamW and the sum of squares over many tensors in one launch each, in Triton: see ``ops/adamw.py`` for the formula.

Note [Many tensors in one launch]. A program works on one block of one tensor. Two small tables tell it which: the
tensor's number for every program, and for every tensor its addresses, its number of elements and its first program.
The first depends on sizes alone and stays on the device; the second is sent again only when an address has changed.

Note [Wide loads]. A compiler that knows nothing of an address or a mask loads one element at a time. So tensors that
begin at a multiple of 16 bytes go into a launch of their own, where addresses are said to; and a program whose block
is whole has no mask.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_fsdpturbo.ops import adamw
from hf_fsdpturbo.ops.adamw import AdamWNumbers, AdamWTensors

# Shapes of programs, the fastest of benchmarks/adamw.py --sweep on an H200.
ADAMW_BLOCK, ADAMW_WARPS = 1024, 4
SQUARE_BLOCK, SQUARE_WARPS = 4096, 4

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_KNOWN = frozenset(_DTYPES)
_ALIGNMENT = 16  # bytes


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(pointer, at, count, WHOLE: tl.constexpr):
    if WHOLE:
        value = tl.load(pointer + at)
    else:
        value = tl.load(pointer + at, mask=at < count, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _store(pointer, at, count, value, WHOLE: tl.constexpr):
    value = value.to(pointer.dtype.element_ty)
    if WHOLE:
        tl.store(pointer + at, value)
    else:
        tl.store(pointer + at, value, mask=at < count)


@triton.jit
def _adamw_block(
    weight_ptr, gradient_ptr, mean_ptr, square_ptr, copy_ptr, at, count, factor,
    decay, mean_weight, square_weight, step_size, root_correction, eps, COPY: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    weight = _load(weight_ptr, at, count, WHOLE)
    gradient = _load(gradient_ptr, at, count, WHOLE) * factor
    mean = _load(mean_ptr, at, count, WHOLE)
    square = _load(square_ptr, at, count, WHOLE)
    weight = weight - decay * weight
    mean = mean + mean_weight * (gradient - mean)
    square = square + square_weight * (gradient * gradient - square)
    weight = weight - step_size * mean / (tl.sqrt(square) / root_correction + eps)
    _store(weight_ptr, at, count, weight, WHOLE)
    _store(mean_ptr, at, count, mean, WHOLE)
    _store(square_ptr, at, count, square, WHOLE)
    if COPY:
        _store(copy_ptr, at, count, weight.to(weight_ptr.dtype.element_ty), WHOLE)


@triton.jit
def _adamw_kernel(
    tensor_ptr, table_ptr, factor_ptr, decay, mean_weight, square_weight, step_size, root_correction, eps,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, MEAN: tl.constexpr, SQUARE: tl.constexpr, COPY: tl.constexpr,
    HAS_COPY: tl.constexpr, FACTOR: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = table_ptr + tl.load(tensor_ptr + tl.program_id(0)).to(tl.int64) * 7
    weight_ptr = _pointer(tl.load(row), WEIGHT, ALIGNED)
    gradient_ptr = _pointer(tl.load(row + 1), GRADIENT, ALIGNED)
    mean_ptr = _pointer(tl.load(row + 2), MEAN, ALIGNED)
    square_ptr = _pointer(tl.load(row + 3), SQUARE, ALIGNED)
    copy_ptr = _pointer(tl.load(row + 4), COPY, ALIGNED)
    count = tl.load(row + 5)
    start = (tl.program_id(0) - tl.load(row + 6)) * B
    at = start + tl.arange(0, B)
    factor = 1.0
    if FACTOR:
        factor = tl.load(factor_ptr)
    if start + B <= count:
        _adamw_block(
            weight_ptr, gradient_ptr, mean_ptr, square_ptr, copy_ptr, at, count, factor,
            decay, mean_weight, square_weight, step_size, root_correction, eps, HAS_COPY, True,
        )  # fmt: skip
    else:
        _adamw_block(
            weight_ptr, gradient_ptr, mean_ptr, square_ptr, copy_ptr, at, count, factor,
            decay, mean_weight, square_weight, step_size, root_correction, eps, HAS_COPY, False,
        )  # fmt: skip


@triton.jit
def _square_sum_kernel(
    tensor_ptr, table_ptr, out_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr
):
    row = table_ptr + tl.load(tensor_ptr + tl.program_id(0)).to(tl.int64) * 3
    pointer = _pointer(tl.load(row), DTYPE, ALIGNED)
    count = tl.load(row + 1)
    start = (tl.program_id(0) - tl.load(row + 2)) * B
    at = start + tl.arange(0, B)
    if start + B <= count:
        value = _load(pointer, at, count, True)
        tl.store(out_ptr + tl.program_id(0), tl.sum(value * value, 0))
    else:
        value = _load(pointer, at, count, False)
        tl.store(out_ptr + tl.program_id(0), tl.sum(value * value, 0))


@functools.lru_cache(maxsize=32)
def _programs(sizes: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """``(tensor's number for every program, int32; first program of every tensor)``. No size is 0."""
    programs = [-(-size // block) for size in sizes]
    first = tuple(itertools.accumulate(programs, initial=0))
    numbers = torch.arange(len(sizes), dtype=torch.int32, device=device)
    repeats = torch.tensor(programs, device=device)
    return torch.repeat_interleave(numbers, repeats, output_size=first[-1]), first[:-1]


@functools.lru_cache(maxsize=32)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """``rows`` on the device, int64; sent without waiting."""
    return torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def adamw_(tensors: list[AdamWTensors], numbers: AdamWNumbers, factor: Tensor | None = None) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`. A launch for each set of dtypes.

    float64, and weights or averages that are not contiguous, run in plain PyTorch.
    """
    launches: dict[tuple[Any, ...], tuple[list[AdamWTensors], list[tuple[int, ...]]]] = defaultdict(lambda: ([], []))
    others = []
    for each in tensors:
        if not each.gradient.is_contiguous():
            each = AdamWTensors(each.parameter, each.gradient.contiguous(), *each[2:])
        present = tuple([tensor for tensor in each if tensor is not None])
        dtypes = tuple([tensor.dtype for tensor in present])
        if not (_KNOWN.issuperset(dtypes) and all([tensor.is_contiguous() for tensor in present])):
            others.append(each)
            continue
        addresses = tuple([tensor.data_ptr() for tensor in present])
        members, rows = launches[(*dtypes, _are_aligned(addresses))]
        members.append(each)
        rows.append(addresses if each.copy is not None else (*addresses, 0))
    for key, (members, rows) in launches.items():
        _launch(members, rows, key[:-1], key[-1], numbers, factor)
    adamw.adamw_(others, numbers, factor)


def _are_aligned(addresses: tuple[int, ...]) -> bool:
    return functools.reduce(operator.or_, addresses) % _ALIGNMENT == 0


def _launch(
    members: list[AdamWTensors],
    addresses: list[tuple[int, ...]],
    dtypes: tuple[torch.dtype, ...],
    aligned: bool,
    numbers: AdamWNumbers,
    factor: Tensor | None,
) -> None:
    device, has_copy = members[0].parameter.device, len(dtypes) == 5
    sizes = tuple([each.parameter.numel() for each in members])
    tensor, first = _programs(sizes, ADAMW_BLOCK, device)
    table = _table(tuple([(*row, size, at) for row, size, at in zip(addresses, sizes, first, strict=True)]), device)
    weight, gradient, mean, square, *copy = (_DTYPES[dtype] for dtype in dtypes)
    _adamw_kernel[(tensor.numel(),)](
        tensor, table, table if factor is None else factor.to(device, torch.float32), *numbers,
        WEIGHT=weight, GRADIENT=gradient, MEAN=mean, SQUARE=square, COPY=copy[0] if has_copy else weight,
        HAS_COPY=has_copy, FACTOR=factor is not None, ALIGNED=aligned, B=ADAMW_BLOCK, num_warps=ADAMW_WARPS,
    )  # fmt: skip
    # autograd is told, as by any in-place operation: a graph that still needs an old weight fails instead of using it
    increment_version([t for each in members for t in (each.parameter, *each[2:]) if t is not None])


def square_sum(tensors: list[Tensor]) -> Tensor:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`. One number a program, then their sum: the same in every run."""
    launches: dict[tuple[torch.dtype, bool], list[Tensor]] = defaultdict(list)
    others = []
    for each in tensors:
        if each.is_contiguous() and each.dtype in _DTYPES:
            launches[each.dtype, _are_aligned((each.data_ptr(),))].append(each)
        else:
            others.append(each)
    sums = [adamw.square_sum(others)] if others else []
    for (dtype, aligned), members in launches.items():
        device, sizes = members[0].device, tuple(each.numel() for each in members)
        tensor, first = _programs(sizes, SQUARE_BLOCK, device)
        rows = tuple((each.data_ptr(), size, at) for each, size, at in zip(members, sizes, first, strict=True))
        out = torch.empty(tensor.numel(), dtype=torch.float32, device=device)
        _square_sum_kernel[(tensor.numel(),)](
            tensor, _table(rows, device), out, DTYPE=_DTYPES[dtype], ALIGNED=aligned, B=SQUARE_BLOCK,
            num_warps=SQUARE_WARPS,
        )  # fmt: skip
        sums.append(out.sum())
    return torch.stack(sums).sum()
