"""quack's grouped matmuls (an optional extra): used for a shape where they agree with torch's and are faster.

S slots, L experts; A, B the two other sizes of a product.

The choice is made on the run's own tensors, at the first product of each shape that is large enough to matter, before
any of its results is used: so a forward and its recompute run the same kernel. It needs a host sync then, never again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.compat import is_available
from hf_fsdpturbo.ops import torch as plain
from hf_fsdpturbo.ops.relative_distance import relative_distance

logger = logging.getLogger(__name__)

ENOUGH_SLOTS = 8192
"""Slots below which a product is torch's: there the host sets the pace, and quack's call costs it more."""
TOLERANCE = 1e-2
"""``||a - b|| / ||b||`` of two bf16 products; roundings alone give 3e-3."""
GAIN = 0.98
"""Share of torch's time that is worth another library."""
ROUNDS = 5
_BOUNDS = "bounds_behind_zero"

_uses_quack: dict[tuple[Any, ...], bool] = {}


@functools.cache
def _gemm() -> Callable[..., Tensor] | None:
    """``quack.gemm_interface.gemm``; None where it is not there or does not import."""
    if not is_available("quack"):
        return None
    try:
        from quack.gemm_interface import gemm
    except (ImportError, RuntimeError, AttributeError, OSError, ValueError) as error:
        logger.warning("quack is installed but does not import (%s): torch's grouped matmul runs.", error)
        return None
    return gemm  # type: ignore[no-any-return]


def grouped_mm(left: Tensor, right: Tensor, offsets_L: Tensor) -> Tensor:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    rows = left.shape[0] if right.ndim == 3 else right.shape[0]
    if rows < ENOUGH_SLOTS or left.dtype != torch.bfloat16 or not left.is_cuda or _gemm() is None:
        return plain.grouped_mm(left, right, offsets_L)
    sizes = (left.shape[1], *right.shape) if right.ndim == 3 else (left.shape[0], right.shape[1])
    key = (*sizes, left.is_contiguous(), right.is_contiguous(), len(offsets_L))
    if key not in _uses_quack:
        _uses_quack[key] = _choose(left, right, offsets_L, sizes)
    return _quack(left, right, offsets_L) if _uses_quack[key] else plain.grouped_mm(left, right, offsets_L)


def _quack(left: Tensor, right: Tensor, offsets_L: Tensor) -> Tensor:
    gemm = _gemm()
    assert gemm is not None
    bounds = _bounds(offsets_L)
    if right.ndim == 3:
        return gemm(left, right, cu_seqlens_m=bounds, tuned=False)
    out = left.new_empty(len(offsets_L), left.shape[0], right.shape[1])
    gemm(left, right, out=out, cu_seqlens_k=bounds, tuned=False)
    return out


def _bounds(offsets_L: Tensor) -> Tensor:
    """The ends of groups behind a zero, as quack takes them: made once for the six products of a block."""
    found: Tensor | None = getattr(offsets_L, _BOUNDS, None)
    if found is None:
        found = torch.nn.functional.pad(offsets_L, (1, 0))
        setattr(offsets_L, _BOUNDS, found)  # ends are never written again, and go with their layer's graph
    return found


def _choose(left: Tensor, right: Tensor, offsets_L: Tensor, sizes: tuple[int, ...]) -> bool:
    """Whether quack's product of these tensors is torch's, and faster."""
    what = f"grouped matmul of {'x'.join(map(str, sizes))}, {len(offsets_L)} experts"
    expected = plain.grouped_mm(left, right, offsets_L)
    try:
        found = _quack(left, right, offsets_L)
        off = relative_distance(found, expected)
        if not off < TOLERANCE:
            logger.warning("%s: quack is off by %.1e from torch, which runs.", what, off)
            return False
        del found, expected
        theirs, ours = (_milliseconds(f, left, right, offsets_L) for f in (_quack, plain.grouped_mm))
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError, ImportError) as error:
        logger.warning("%s: quack fails (%s: %s), torch runs.", what, type(error).__name__, str(error)[:200])
        return False
    chosen = theirs < GAIN * ours
    logger.info("%s: quack %.3f ms, torch %.3f ms: %s runs.", what, theirs, ours, "quack" if chosen else "torch")
    return chosen


def _milliseconds(function: Callable[..., Tensor], left: Tensor, right: Tensor, offsets_L: Tensor) -> float:
    function(left, right, offsets_L)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(ROUNDS):
        function(left, right, offsets_L)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / ROUNDS
