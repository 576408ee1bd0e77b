"""The causal convolution of linear attention in plain PyTorch: any device, packed documents kept apart.

Shape legend: B batch, S sequence, N documents of a flattened batch, W kernel width, Ch channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hf_fsdpturbo.packing.documents import document_ids_from_cu_seqlens


def runs_of(document_ids: torch.Tensor) -> torch.Tensor:
    """``[B, S]`` int64 index of the run of equal ids that each position is in; an id that comes back is a new run."""
    starts = torch.zeros_like(document_ids, dtype=torch.int64)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts.cumsum(1)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    document_ids: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """Depthwise causal convolution: ``out[t] = act(bias + sum_j weight[W-1-j] x[t-j])``.

    Taps that would reach into another document, or before the row, read zero. Documents as in
    ``gated_delta_rule.chunk_gated_delta_rule``; ids shorter than S (a cache put earlier columns in front of x) are
    extended with their first one. Arithmetic is in weight's dtype, sums over taps in float32.

    Args:
        x: ``[B, Ch, S]``.
        weight: ``[Ch, W]``.
        bias: ``[Ch]``.
        activation: a name that Transformers knows.
        document_ids, seq_idx: ``[B, S]`` or shorter.
        cu_seqlens, cu_seq_lens_q: ``[N + 1]``, for B == 1.

    Returns:
        ``[B, Ch, S]`` in x's dtype.

    Raises:
        ValueError: ids that do not fit x.
    """
    length, width = x.shape[-1], weight.shape[-1]
    ids = document_ids if document_ids is not None else seq_idx
    cumulative = cu_seqlens if cu_seqlens is not None else cu_seq_lens_q
    if ids is None and cumulative is not None:
        ids = document_ids_from_cu_seqlens(cumulative, length)
    if ids is None:
        # Padded on the left alone, outputs are as many as inputs: x is often a transposed view, so the padded copy is
        # the one that a convolution makes anyway, and what follows has no slice to copy in its backward.
        padded = F.pad(x.to(weight.dtype), (width - 1, 0))
        out = F.conv1d(padded, weight.unsqueeze(1), bias, groups=x.shape[1])
    else:
        if ids.shape[1] < length:
            ids = torch.cat((ids[:, :1].expand(-1, length - ids.shape[1]), ids), 1)
        if ids.shape != (x.shape[0], length):
            raise ValueError(f"document ids are {tuple(ids.shape)}, expected [B, S] = [{x.shape[0]}, {length}].")
        out = _conv_within_runs(x.to(weight.dtype), weight, bias, runs_of(ids.to(x.device)))
    if activation is not None:
        out = _activation(activation, out)
    return out.to(x.dtype)


def _conv_within_runs(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, runs: torch.Tensor
) -> torch.Tensor:
    """One shifted multiply-add per tap: W is 4 in every model there is, so this stays cheap and needs no gather."""
    wide = x if x.dtype == torch.float64 else x.float()
    out = wide * weight[:, -1:]
    for shift in range(1, min(weight.shape[-1], x.shape[-1])):
        same = F.pad(runs[:, shift:] == runs[:, :-shift], (shift, 0)).unsqueeze(1)
        tap = weight.shape[-1] - 1 - shift
        out = out + F.pad(wide[..., :-shift], (shift, 0)).masked_fill(~same, 0) * weight[:, tap : tap + 1]
    if bias is not None:
        out = out + bias.unsqueeze(-1)
    return out.to(weight.dtype)


def _activation(name: str, x: torch.Tensor) -> torch.Tensor:
    if name in ("silu", "swish"):
        return F.silu(x)
    from transformers.activations import ACT2FN

    return ACT2FN[name](x)
