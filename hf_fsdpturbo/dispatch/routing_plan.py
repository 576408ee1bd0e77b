"""The plan of a deduplicated exchange: which rows go where, in which slots they land, how many there are.

T tokens, K top-k, P ranks of the ep axis, E / L all / local experts, X = E + P. Ranks gather each other's counts (X
integers a rank), which tells everyone its splits and every pair its slot at the owner of its expert. The gather and
the copy to the host run beside the current stream: :meth:`RoutingPlan.finish` waits for the numbers as late as it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_fsdpturbo.dispatch.side_stream import SideWork, beside
from hf_fsdpturbo.ops.expert_mlp import SlotMap
from hf_fsdpturbo.ops.table import OpSet, Routing

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True)
class GatheredCounts:
    """Counts of all ranks for slices planned together, ``[P, slices, X]``, on the device and on the host."""

    device_table: Tensor
    host_table: Tensor
    work: SideWork


class Stage:
    """One exchange of rows and, where it ends at the experts, the slots there.

    Attributes:
        ops: operators of the device.
        routing: which row carries each pair.
        offsets_L: ends of this rank's experts among its slots.
        num_slots: pairs that reach this rank.
        send_splits, receive_splits: rows per rank of the exchange's group.
    """

    ops: OpSet
    routing: Routing
    offsets_L: Tensor
    num_slots: int
    send_splits: list[int]
    receive_splits: list[int]

    def slot_map(self, slots_RK: Tensor) -> SlotMap:
        """The slot map of received rows whose slots are ``slots_RK``."""
        return SlotMap(slots_RK, self.offsets_L, self.num_slots)


class RoutingPlan(Stage):
    """One slice of tokens on its way to the experts; complete after :meth:`place` and :meth:`finish`.

    Made by :func:`plan_slices`. Its ``routing`` is there from the start, as all that packing rows needs.

    Attributes:
        slots_TK: slot of every pair at the owner of its expert.
    """

    slots_TK: Tensor

    def __init__(self, routing: Routing, ops: OpSet, rank: int, counts: GatheredCounts, part: int) -> None:
        self.routing = routing
        self.ops = ops
        self._rank = rank
        self._counts: GatheredCounts | None = counts
        self._part = part
        self._placed = False

    def place(self) -> None:
        """Slots and ends, on the device alone: the stream waits for the counts, the host does not. Once."""
        if self._placed:
            return
        self._placed = True
        assert self._counts is not None
        self._counts.work.wait()
        self._place(self._counts.device_table[:, self._part])

    def finish(self) -> None:
        """Splits and the number of slots: the host waits here, once for all slices that were planned together."""
        if self._counts is None:
            return
        counts, self._counts = self._counts, None
        counts.work.synchronize()
        self._finish(counts.host_table.numpy()[:, self._part])  # numpy: its few sums are on the host's critical path

    def _place(self, totals_PX: Tensor) -> None:
        self.slots_TK, self.offsets_L = self.ops.slot_pairs(self.routing, totals_PX, self._rank)

    def _finish(self, table_PX: numpy.ndarray) -> None:
        ep_size = table_PX.shape[0]
        num_experts = table_PX.shape[1] - ep_size
        num_local = num_experts // ep_size
        self.send_splits = table_PX[self._rank, num_experts:].tolist()
        self.receive_splits = table_PX[:, num_experts + self._rank].tolist()
        self.num_slots = int(table_PX[:, self._rank * num_local : (self._rank + 1) * num_local].sum())


def gather_counts(totals: list[Tensor], group: ProcessGroup) -> GatheredCounts:
    """Gather ``totals``, one ``[X]`` a slice, from all ranks; runs beside the current stream. Collective."""
    # An all-to-all of equal copies is an all-gather, under a name that no torch release deprecates.
    mine = totals[0].unsqueeze(0) if len(totals) == 1 else torch.stack(totals)
    mine = mine.expand(dist.get_world_size(group), -1, -1).contiguous()
    device_table = torch.empty_like(mine)
    on_host = mine.device.type == "cpu"
    host_table = device_table if on_host else torch.empty_like(device_table, device="cpu", pin_memory=True)
    with beside(mine.device, mine, device_table) as block:
        dist.all_to_all_single(device_table, mine, group=group)
        if not on_host:
            host_table.copy_(device_table, non_blocking=True)
    return GatheredCounts(device_table, host_table, block.work)


def plan_slices(
    index_slices: list[Tensor], num_experts: int, group: ProcessGroup, ops: OpSet
) -> list[RoutingPlan]:
    """Plan slices of tokens together: one gather of counts for all of them.

    Args:
        index_slices: ``top_k_index [T_i, K]`` of each slice, experts numbered over the group.
        num_experts: experts over the whole group.
        group: the ep axis; all its ranks call this together.
        ops: operators of the device.
    """
    routings = [ops.count_routing(index_TK, num_experts, dist.get_world_size(group)) for index_TK in index_slices]
    counts = gather_counts([routing.totals_X for routing in routings], group)
    rank = dist.get_rank(group)
    return [RoutingPlan(routing, ops, rank, counts, part) for part, routing in enumerate(routings)]
