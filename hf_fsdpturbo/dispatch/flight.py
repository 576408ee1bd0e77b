"""One exchange of rows and its reverse in backward, which may leave before autograd asks for it.

Expert blocks know their rows' gradient before they have computed their weights' gradients: they let the rows leave on
the side stream first, and the exchange is over when autograd gets to it. R rows, W elements a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_fsdpturbo.dispatch.recompute import keep_or_make
from hf_fsdpturbo.dispatch.row_exchange import exchange_rows
from hf_fsdpturbo.dispatch.side_stream import SideWork, beside
from hf_fsdpturbo.dispatch.traffic import TRAFFIC


class Flight:
    """Splits and group of one exchange, and what of it is under way.

    Args:
        output_splits, input_splits: rows from and to each rank of the group, forward.
    """

    def __init__(self, output_splits: list[int], input_splits: list[int], group: ProcessGroup) -> None:
        self.output_splits = output_splits
        self.input_splits = input_splits
        self.group = group
        self.work: SideWork | None = None
        self._reversed: tuple[Tensor, SideWork] | None = None

    def depart(self, rows: Tensor) -> Tensor:
        """Start the exchange on the side stream; its result may be read after ``work.wait()``."""
        received, self.work = self._exchange_beside(rows, self.output_splits, self.input_splits)
        return received

    def depart_once(self, rows: Tensor) -> Tensor:
        """As :meth:`depart`, but a recompute has what came in the forward, if that is kept."""
        received, self.work = keep_or_make(lambda: self._exchange_beside(rows, self.output_splits, self.input_splits))
        return received.view_as(received)

    def leave(self, gradient: Tensor) -> None:
        """Start the reverse exchange on the side stream, unless it has left already."""
        if self._reversed is None:
            self._reversed = self._exchange_beside(gradient, self.input_splits, self.output_splits)

    def arrive(self, gradient: Tensor) -> Tensor:
        """The exchanged gradient: waited for if it left early, exchanged now if not."""
        if self._reversed is None:
            return exchange_rows(gradient, self.input_splits, self.output_splits, self.group)
        (received, work), self._reversed = self._reversed, None
        work.wait()
        return received

    def _exchange_beside(self, rows: Tensor, outputs: list[int], inputs: list[int]) -> tuple[Tensor, SideWork]:
        rows = rows.contiguous()
        received = rows.new_empty((sum(outputs), *rows.shape[1:]))
        TRAFFIC.sent(rows, inputs, self.group)
        with beside(rows.device, rows, received) as block:
            dist.all_to_all_single(received, rows, outputs, inputs, group=self.group)
        return received, block.work


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        received = keep_or_make(lambda: exchange_rows(rows, flight.output_splits, flight.input_splits, flight.group))
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.flight.arrive(gradients[0]), None


def send_rows(rows: Tensor, flight: Flight) -> Tensor:
    """``rows [sum(input_splits), W]`` -> ``[sum(output_splits), W]``, differentiable.

    A recompute has the rows that came in the forward, if those are kept. Whoever computes the gradient of the result
    may hand it to ``flight.leave`` before returning it.
    """
    return _Send.apply(rows, flight)
