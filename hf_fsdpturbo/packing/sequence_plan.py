"""What every layer needs to know of the whole sequence, worked out once per forward: padding, documents, masks.

B batch, S whole sequence after padding to a multiple of cp, W window.

The plan travels to the layers as a keyword (``sequence_plan``) and not as a global: activation checkpointing replays a
layer in backward with the keywords of its own forward, whatever other forwards ran in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_fsdpturbo.packing.documents import Documents, derive_documents, documents_from_ids

KEYWORD = "sequence_plan"


class SequencePlan:
    """One forward's sequence as all cp ranks see it. Not a dataclass: FSDP's input cast copies those for every layer.

    Attributes:
        group, size, rank: the cp group and this rank's place in it; None, 1, 0 without context parallelism.
        batch, length: B, and S padded to a multiple of ``size``.
        valid: ``[B, S]`` bool where attention must not read some keys; None where being causal is enough (no padding,
            or padding at the end of every row only, which nothing before it can see).
        documents: of the whole sequence; None where every row is one document.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        size: int,
        rank: int,
        batch: int,
        length: int,
        valid: Tensor | None,
        documents: Documents | None,
        device: torch.device,
    ) -> None:
        self.group, self.size, self.rank = group, size, rank
        self.batch, self.length = batch, length
        self.valid, self.documents, self.device = valid, documents, device
        self._kept: dict[Hashable, Any] = {}

    @property
    def cp_group(self) -> ProcessGroup:
        """The group, where there must be one."""
        assert self.group is not None
        return self.group

    @property
    def local(self) -> slice:
        """This rank's positions."""
        part = self.length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """``make()`` at the first call of this forward, the same object at every later one (one per layer)."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def needs_mask(self, window: int | None) -> bool:
        """Whether being causal is not enough."""
        return self.valid is not None or self.documents is not None or (window is not None and window < self.length)

    def mask(self, window: int | None = None) -> Tensor | None:
        """``[B or 1, 1, S, S]`` bool, True where query (dim 2) reads key (dim 3); None where causal is enough."""
        if not self.needs_mask(window):
            return None
        return self.once(("mask", window), lambda: self._allowed(window))

    def additive_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """The same as numbers to add to scores: 0, or the lowest of ``dtype``; the causal part always included."""

        def make() -> Tensor:
            allowed = self._allowed(window)
            return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)

        return self.once(("additive", window, dtype), make)

    def _allowed(self, window: int | None) -> Tensor:
        positions = torch.arange(self.length, device=self.device)
        distance = positions[:, None] - positions[None, :]
        allowed = distance >= 0
        if window is not None:
            allowed = allowed & (distance < window)
        allowed = allowed[None, None]
        if self.documents is not None:
            ids = self.documents.ids
            allowed = allowed & (ids[:, None, :, None] == ids[:, None, None, :])
        if self.valid is not None:
            # Queries at padding may be left with nothing to read. As Transformers does, they stay so: SDPA and flex
            # give zeros there (torch >= 2.5), eager a mean; what they return reaches no real token.
            allowed = allowed & self.valid[:, None, None, :]
        return allowed


def padded_length(length: int, size: int, least_slice: int) -> int:
    """The next multiple of ``size`` that gives every rank at least ``least_slice`` positions."""
    return max(-(-length // size), least_slice) * size


def make_plan(
    group: ProcessGroup | None,
    batch: int,
    length: int,
    device: torch.device,
    *,
    least_slice: int = 1,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> SequencePlan:
    """Plan of a ``[B, length]`` batch that all ranks of ``group`` hold; two or three device syncs.

    Args:
        least_slice: every rank gets at least so many positions (a convolution reaches back that far).
        attention_mask: ``[B, length]``, 0 at padding.
        position_ids, cu_seq_lens_q, seq_idx: where documents begin, see ``kernels.documents.derive_documents``.
    """
    size, rank = 1, 0
    if group is not None:
        size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    whole = padded_length(length, size, least_slice)
    extra = whole - length
    documents = derive_documents(
        batch, length, position_ids=position_ids, cu_seq_lens_q=cu_seq_lens_q, seq_idx=seq_idx
    )
    if documents is not None and attention_mask is not None and not _packed(documents.ids, attention_mask):
        documents = None
    if documents is not None and extra:
        documents = documents_from_ids(F.pad(documents.ids, (0, extra), value=-1))
    valid = None
    if attention_mask is not None:
        seen = F.pad(attention_mask.to(device=device, dtype=torch.bool), (0, extra))
        if bool((seen[:, 1:] & ~seen[:, :-1]).any()):  # padding before or inside a row
            valid = seen
    return SequencePlan(group, size, rank, batch, whole, valid, documents, device)


def _packed(ids_BS: Tensor, attention_mask_BS: Tensor) -> bool:
    """Whether a row has real tokens of two documents; positions of padding alone look like documents too."""
    real_BS = attention_mask_BS.to(device=ids_BS.device, dtype=torch.bool)
    ends = torch.iinfo(ids_BS.dtype)
    first_B = ids_BS.masked_fill(~real_BS, ends.max).amin(1)
    last_B = ids_BS.masked_fill(~real_BS, ends.min).amax(1)
    return bool((last_B > first_B).any())


def block_mask(plan: SequencePlan, window: int | None) -> Any:
    """Flex attention's ``BlockMask`` of the whole sequence."""
    from torch.nn.attention.flex_attention import create_block_mask

    ids = None if plan.documents is None else plan.documents.ids
    valid = plan.valid

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        keep = q >= k
        if window is not None:
            keep = keep & (q - k < window)
        if ids is not None:
            keep = keep & (ids[b, q] == ids[b, k])
        if valid is not None:
            keep = keep & valid[b, k]
        return keep

    batch = None if ids is None and valid is None else plan.batch
    return create_block_mask(allowed, batch, None, plan.length, plan.length, device=plan.device)
