"""Tensors spread over ranks: who holds which box of each, and bringing rows of one tensor to one rank.

*Rows* are indices of dim 0; boxes see ``shards.py``.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from hf_fsdpturbo.ranks import agree, everyone, rank
from hf_fsdpturbo.shards import Box, local_box, local_tensor, transport_device


def _check_cover(name: str, shape: torch.Size, boxes: set[Box]) -> None:
    covered = sum(math.prod(box.shape) for box in boxes)
    if covered != math.prod(shape):
        raise ValueError(f"{name}: the ranks' parts hold {covered} elements of {math.prod(shape)}.")


class RankTensors:
    """Tensors spread over all ranks, by name; every rank has the same names.

    Building it exchanges the boxes once (collective).
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        mine: dict[str, Box] = {}
        error: Exception | None = None
        try:
            mine = {name: local_box(tensor) for name, tensor in tensors.items()}
        except ValueError as caught:
            error = caught
        agree(error, "reading the sharding")
        theirs: list[dict[str, Box]] = everyone(mine)
        self.holders: dict[str, dict[Box, list[int]]] = {}
        for name, tensor in tensors.items():
            holders: dict[Box, list[int]] = {}
            for owner, boxes in enumerate(theirs):
                if math.prod(boxes[name].shape):
                    holders.setdefault(boxes[name], []).append(owner)
            _check_cover(name, tensor.shape, set(holders))
            self.holders[name] = dict(sorted(holders.items()))

    def begin(self, names: tuple[str, ...]) -> None:
        """Nothing is kept between tensors."""

    def owner_of_rows(self, name: str, start: int, stop: int) -> list[int]:
        """Ranks that hold all of the rows; empty if no rank has them whole."""
        shape = self.tensors[name].shape
        for box, owners in self.holders[name].items():
            if box.rows(start, stop) == (start, stop) and box.shape[1:] == tuple(shape[1:]):
                return owners
        return []

    def rows(self, name: str, start: int, stop: int, writer: int) -> Tensor | None:
        """Rows ``[start, stop)`` of a tensor on the CPU of ``writer``; None elsewhere.

        Every rank must call it in the same order; ranks that hold none of the rows do nothing. Tensors without
        dimensions count as one row.
        """
        tensor = self.tensors[name]
        me = rank()
        local = local_tensor(tensor)
        if tensor.ndim == 0:
            return local.cpu() if me == writer else None
        owners = self.owner_of_rows(name, start, stop)
        if writer in owners:
            own = next(box for box, ranks in self.holders[name].items() if writer in ranks)
            first = start - own.offset[0]
            return local[first : first + stop - start].cpu() if me == writer else None
        return self._collect(name, local, start, stop, writer)

    def _collect(self, name: str, local: Tensor, start: int, stop: int, writer: int) -> Tensor | None:
        shape, me = self.tensors[name].shape, rank()
        whole = torch.empty((stop - start, *shape[1:]), dtype=local.dtype) if me == writer else None
        received: list[tuple[Box, int, int, Tensor]] = []
        operations: list[dist.P2POp] = []
        for box, owners in self.holders[name].items():
            first, last = box.rows(start, stop)
            if first >= last:
                continue
            source = writer if writer in owners else owners[0]
            if source == me:
                part = local[first - box.offset[0] : last - box.offset[0]]
                if me == writer:
                    received.append((box, first, last, part))
                else:
                    sent = part.to(transport_device(local)).contiguous()
                    operations.append(dist.P2POp(dist.isend, sent, writer))
            elif me == writer:
                buffer = torch.empty(
                    (last - first, *box.shape[1:]), dtype=local.dtype, device=transport_device(local)
                )
                operations.append(dist.P2POp(dist.irecv, buffer, source))
                received.append((box, first, last, buffer))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        if whole is not None:
            for box, first, last, part in received:
                rest = tuple(slice(o, o + s) for o, s in zip(box.offset[1:], box.shape[1:], strict=True))
                whole[(slice(first - start, last - start), *rest)] = part.to("cpu")
        return whole
