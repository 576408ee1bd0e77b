"""How far a tensor is from the one that it is to equal: what trials of kernels judge by."""

from __future__ import annotations

from torch import Tensor


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """``||found - expected|| / ||expected||``, computed in float32; waits for the device. NaN if either has one."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())
