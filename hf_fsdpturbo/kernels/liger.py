"""Liger's Triton kernels for CUDA: RMSNorm and rotary embedding. The one file that imports liger_kernel, late.

Shape legend: B batch, H / Hkv query / key heads, S sequence, R rotary part of the head size, D size of the normalised
dim.
"""

from __future__ import annotations

import importlib

import torch

from hf_fsdpturbo.compat import require


def load(asked_by: str) -> None:
    """Import Liger's kernels now, so that a missing package or a broken Triton is an error before training starts.

    Raises:
        MissingDependencyError: (a ValueError) names the setting and the extra to install.
    """
    require("liger_kernel", asked_by)
    importlib.import_module("liger_kernel.ops")
    importlib.import_module("liger_kernel.transformers.rope")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool) -> torch.Tensor:
    """RMSNorm over the last dim of ``x [..., D]``, ``weight [D]``; zero_centred multiplies by 1 + weight, in float32.

    Never in place: a norm's input is also the residual.
    """
    function = importlib.import_module("liger_kernel.ops").LigerRMSNormFunction
    offset, casting = (1.0, "gemma") if zero_centred else (0.0, "llama")
    out: torch.Tensor = function.apply(x, weight, eps, offset, casting, False, None)
    return out


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate halves (not interleaved) of ``q [B, H, S, R]``, ``k [B, Hkv, S, R]`` by ``cos, sin [B or 1, S, R]``."""
    function = importlib.import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb
    rotated_q, rotated_k = function(q, k, cos, sin)
    return rotated_q, rotated_k
