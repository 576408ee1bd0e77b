"""Tensors spread over ranks: bringing rows of one tensor to one rank.

*Rows* are indices of dim 0; who holds which see ``layouts.py``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hf_fsdpturbo.checkpoint.layouts import find_layouts
from hf_fsdpturbo.ranks import rank
from hf_fsdpturbo.shards import Box, local_tensor, transport_device


class RankTensors:
    """Tensors spread over all ranks, by name; every rank has the same names.

    Building it exchanges their layouts once (collective).

    Raises:
        CheckpointError: as :func:`find_layouts`.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.layouts = find_layouts(tensors)

    def begin(self, names: tuple[str, ...]) -> None:
        """Nothing is kept between tensors."""

    def owner_of_rows(self, name: str, start: int, stop: int) -> list[int]:
        """Ranks that hold all of the rows; empty if no rank has them whole."""
        return self.layouts[name].owners(start, stop)

    def sharers_of_rows(self, name: str, start: int, stop: int) -> list[int]:
        """Ranks that hold some of the rows."""
        return self.layouts[name].sharers(start, stop)

    def rows(self, name: str, start: int, stop: int, writer: int) -> Tensor | None:
        """Rows ``[start, stop)`` of a tensor on the CPU of ``writer``; None elsewhere.

        Every rank must call it in the same order; ranks that hold none of the rows do nothing. Tensors without
        dimensions count as one row.
        """
        tensor, me = self.tensors[name], rank()
        local = local_tensor(tensor)
        if tensor.ndim == 0:
            return local.cpu() if me == writer else None
        layout = self.layouts[name]
        if writer in layout.owners(start, stop):
            first = start - layout.box_of[writer].offset[0]
            return local[first : first + stop - start].cpu() if me == writer else None
        if me == writer:
            return self._receive(name, local, start, stop)
        self._send(name, local, start, stop, writer)
        return None

    def _send(self, name: str, local: Tensor, start: int, stop: int, writer: int) -> None:
        """This rank's part of the rows, unless another rank of the same box sends it."""
        layout, me = self.layouts[name], rank()
        box = layout.box_of[me]
        first, last = box.rows(start, stop)
        owners = layout.holders.get(box, [])
        if first >= last or not owners or writer in owners or owners[0] != me:
            return
        part = local[first - box.offset[0] : last - box.offset[0]]
        _exchange([dist.P2POp(dist.isend, part.to(transport_device(local)).contiguous(), writer)])

    def _receive(self, name: str, local: Tensor, start: int, stop: int) -> Tensor:
        """The rows, put together from all that hold some of them."""
        layout, me = self.layouts[name], rank()
        whole = torch.empty((stop - start, *layout.shape[1:]), dtype=local.dtype)
        received: list[tuple[Box, int, int, Tensor]] = []
        operations: list[dist.P2POp] = []
        for box, owners in layout.overlapping(start, stop):
            first, last = box.rows(start, stop)
            if me in owners:
                part = local[first - box.offset[0] : last - box.offset[0]]
            else:
                shape = (last - first, *box.shape[1:])
                part = torch.empty(shape, dtype=local.dtype, device=transport_device(local))
                operations.append(dist.P2POp(dist.irecv, part, owners[0]))
            received.append((box, first, last, part))
        _exchange(operations)
        for box, first, last, part in received:
            rest = tuple(slice(o, o + s) for o, s in zip(box.offset[1:], box.shape[1:], strict=True))
            whole[(slice(first - start, last - start), *rest)] = part.to("cpu")
        return whole


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
