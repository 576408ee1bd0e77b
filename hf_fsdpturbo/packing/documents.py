"""Where packed documents begin and end: found once per forward and handed to the linear-attention layers as a keyword.

Shape legend: B batch, S sequence, N documents of the whole batch (a row's start always begins one).

Transformers' decoder layers do not pass ``position_ids`` to linear attention, but they do pass on every keyword that
the base model does not know. So a hook on the base model adds one, ``documents``, which travels through the layers to
our rule and convolution. A keyword and not a global: activation checkpointing replays a layer during backward with the
keywords of its own forward, whatever other forwards (a reference model, the next micro-batch) ran in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Documents:
    """The documents of one packed batch.

    A plain class on purpose: FSDP walks into dataclasses, tuples and dicts among a layer's keywords, rebuilds them at
    every layer and moves what they hold to its device.

    Attributes:
        ids: ``[B, S]`` int64, a new value where a document starts.
        cu_seqlens: ``[N + 1]`` int32 over the B * S flattened positions, on the ids' device.
        cu_seqlens_cpu: a copy of it on the CPU (kernels plan their grid from it without a device sync).
    """

    __slots__ = ("cu_seqlens", "cu_seqlens_cpu", "ids")

    def __init__(self, ids: torch.Tensor, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor) -> None:
        self.ids = ids
        self.cu_seqlens = cu_seqlens
        self.cu_seqlens_cpu = cu_seqlens_cpu


def document_ids_from_cu_seqlens(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """``[1, S]`` int64 ids 0..N-1 from cumulative lengths ``[N + 1]`` (first 0, last S) of a flattened batch."""
    positions = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return (torch.searchsorted(cu_seqlens, positions, right=True) - 1).unsqueeze(0)


def documents_from_ids(ids: torch.Tensor) -> Documents | None:
    """Documents of ``ids [B, S]`` (any integers, a change starts a document); None where every row is one document.

    One device sync.
    """
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    begins = starts.flatten().nonzero().flatten().cpu()
    if begins.numel() == ids.shape[0]:
        return None
    cu_seqlens_cpu = torch.cat((begins, begins.new_tensor([ids.numel()]))).to(torch.int32)
    return Documents(starts.cumsum(1), cu_seqlens_cpu.to(ids.device), cu_seqlens_cpu)


def derive_documents(
    batch: int,
    length: int,
    *,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> Documents | None:
    """The documents of a batch, from the first source given: ``seq_idx``, ``cu_seq_lens_q``, ``position_ids``.

    Padding positions (zeros, ones) become documents of their own, which nothing real reads.

    Args:
        batch, length: B and S.
        position_ids: ``[B or 1, S]``, where a document starts wherever the position is not the one before plus one; or
            ``[4, B, S]`` as the Qwen models stack them, row 0 being those 2-D text positions. Other multi-axis (mRoPE)
            ids restart inside a document and take no part.
        cu_seq_lens_q: ``[N + 1]`` cumulative lengths, for B == 1.
        seq_idx: ``[B, S]``, a change starts a document.

    Returns:
        None when every row is one document, or the sizes say that this is not a packed prompt (one token of a
        generation, ids of another length).
    """
    if length == 1:
        return None
    if seq_idx is not None and seq_idx.shape == (batch, length):
        return documents_from_ids(seq_idx)
    if cu_seq_lens_q is not None and batch == 1:
        return documents_from_ids(document_ids_from_cu_seqlens(cu_seq_lens_q, length))
    if position_ids is None:
        return None
    if position_ids.ndim == 3 and position_ids.shape[0] == 4:
        position_ids = position_ids[0]
    if position_ids.ndim != 2 or position_ids.shape[1] != length or position_ids.shape[0] not in (1, batch):
        return None
    resets = torch.zeros_like(position_ids, dtype=torch.int64)
    resets[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return documents_from_ids(resets.cumsum(1).expand(batch, -1))


def attach_documents(base_model: nn.Module) -> Callable[[], None]:
    """Add the ``documents`` keyword to every forward of a base model (the module that owns the decoder layers).

    A caller that passes ``documents`` itself (context parallelism, which knows the whole sequence) is left alone.

    Returns:
        The undo.
    """
    signature = inspect.signature(type(base_model).forward)

    def before_forward(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if "documents" in kwargs:
            return None
        given = {**kwargs, **signature.bind_partial(module, *args, **kwargs).arguments}
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given.get("inputs_embeds")
        if tokens is None:
            return None
        documents = derive_documents(
            tokens.shape[0],
            tokens.shape[1],
            position_ids=given.get("position_ids"),
            cu_seq_lens_q=kwargs.get("cu_seq_lens_q"),
            seq_idx=kwargs.get("seq_idx"),
        )
        return None if documents is None else (args, {**kwargs, "documents": documents})

    return base_model.register_forward_pre_hook(before_forward, with_kwargs=True).remove
