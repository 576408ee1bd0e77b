"""Ascend kernels for norms, rotary embedding and SwiGLU, from torch_npu's schemas; never run on the hardware.

Shape legend: B batch, H / Hkv query / key heads, S sequence, R rotary part of the head size, D normalised dim, F ffn.
"""

from __future__ import annotations

import torch

from hf_fsdpturbo.ops.npu import load_torch_npu

OPERATORS = ("npu_rms_norm", "npu_rotary_mul", "npu_swiglu")


def load(asked_by: str) -> None:
    """Import torch_npu and look the operators up now.

    Raises:
        ValueError: names the setting and what is missing.
    """
    module = load_torch_npu()
    missing = [name for name in OPERATORS if getattr(module, name, None) is None]
    if missing:
        raise ValueError(f"{asked_by} needs {', '.join(missing)}, which torch-npu lacks. Install torch-npu>=2.7.1.")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool) -> torch.Tensor:
    """RMSNorm over the last dim of ``x [..., D]``: ``npu_rms_norm(input, gamma, epsilon) -> (y, rstd)``.

    The operator wants both in one dtype. A zero-centred norm multiplies by 1 + weight in float32 (1 + w rounds in
    bf16); a plain one casts before the multiplication, as the model does.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        eps: under the root.
        zero_centred: multiply by 1 + weight.
    """
    npu = load_torch_npu()
    if zero_centred:
        y: torch.Tensor = npu.npu_rms_norm(x.float(), 1.0 + weight.float(), eps)[0]
        return y.to(x.dtype)
    y = npu.npu_rms_norm(x, weight.to(x.dtype), eps)[0]
    return y


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the halves of ``q [B, H, S, R]`` and ``k [B, Hkv, S, R]``: ``npu_rotary_mul(input, r1, r2)``.

    Args:
        q, k: queries and keys, the rotary part of their heads.
        cos, sin: ``[B or 1, S, R]``.
    """
    npu = load_torch_npu()
    cos, sin = (x.unsqueeze(1).to(q.dtype) for x in (cos, sin))
    return npu.npu_rotary_mul(q, cos, sin), npu.npu_rotary_mul(k, cos, sin)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, both ``[..., F]``: ``npu_swiglu(input, dim=-1)``, whose first half is the gate."""
    out: torch.Tensor = load_torch_npu().npu_swiglu(torch.cat((gate, up), -1), dim=-1)
    return out
