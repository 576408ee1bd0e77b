"""The reference dispatcher: sort by expert, exchange rows, the module's own forward, exchange back, weighted sum.

T tokens, K top-k, N = T*K pairs, R received rows, E / L all / local experts, D hidden. Eight ranks, L = E / 8:

    tokens of rank r, K copies each, sorted by expert   [to0 | to1 | .. | to7]      N rows
                         all-to-all-v                    |
    rows at rank q, by source then expert               [from0 | from1 | .. | from7] R rows
                         experts q*L .. q*L+L-1          |
                         all-to-all-v back               |
    rank r: unsort, times routing weight, sum over K    [T, D]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hf_fsdpturbo.dispatch.dispatcher import Dispatcher, ReceivedRows
from hf_fsdpturbo.dispatch.recompute import record_or_replay
from hf_fsdpturbo.dispatch.row_exchange import all_to_all_rows


@dataclass(frozen=True)
class EagerPlan:
    """Where rows go: no gradient, no floating point. ``send_splits``/``receive_splits`` are rows per rank of the
    group."""

    order_N: Tensor
    send_splits: list[int]
    receive_splits: list[int]
    local_expert_R: Tensor


@dataclass(frozen=True)
class EagerRecord:
    """What :meth:`EagerDispatcher.combine` needs of the forward."""

    plan: EagerPlan
    top_k_weights: Tensor
    dtype: torch.dtype


class EagerDispatcher(Dispatcher):
    """Works on any device with any experts module; every other dispatcher is compared with it."""

    def plan(self, top_k_index: Tensor) -> EagerPlan:
        """Sort pairs by expert and agree on row counts: one small all-to-all and one host sync, neither in recompute.

        ``top_k_index [T, K]``.
        """
        return record_or_replay(lambda: self._make_plan(top_k_index))

    def _make_plan(self, top_k_index: Tensor) -> EagerPlan:
        expert_N = top_k_index.reshape(-1).long()
        order_N = torch.argsort(expert_N, stable=True)
        counts_E = torch.zeros(self.num_experts, dtype=torch.long, device=expert_N.device)
        counts_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))
        if self.group is None or self.group_size == 1:
            rows = expert_N.numel()
            return EagerPlan(order_N, [rows], [rows], expert_N[order_N])
        sent = counts_E.view(self.group_size, self.num_local_experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        send_splits, receive_splits = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        local = torch.arange(self.num_local_experts, device=expert_N.device).repeat(self.group_size)
        local_expert_R = local.repeat_interleave(received.reshape(-1), output_size=sum(receive_splits))
        return EagerPlan(order_N, send_splits, receive_splits, local_expert_R)

    def dispatch(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> tuple[ReceivedRows, EagerRecord]:
        """One row per (token, expert) pair, weights stay at home."""
        plan = self.plan(top_k_index)
        rows_ND = hidden_states.index_select(0, plan.order_N // top_k_index.shape[1])
        if self.group is not None and self.group_size > 1:
            rows_ND = all_to_all_rows(rows_ND, plan.receive_splits, plan.send_splits, self.group)
        record = EagerRecord(plan, top_k_weights, hidden_states.dtype)
        return ReceivedRows(rows_ND, plan.local_expert_R), record

    def combine(self, expert_output: Tensor, record: EagerRecord) -> Tensor:
        """Exchange back, undo the sort, weigh and sum over K."""
        plan = record.plan
        if self.group is not None and self.group_size > 1:
            expert_output = all_to_all_rows(expert_output, plan.send_splits, plan.receive_splits, self.group)
        return self.weigh_and_sum(expert_output, record)

    def weigh_and_sum(self, expert_output: Tensor, record: EagerRecord) -> Tensor:
        """``expert_output [N, D]``, back home in the plan's order -> ``[T, D]``."""
        plan = record.plan
        position_N = torch.empty_like(plan.order_N)
        position_N[plan.order_N] = torch.arange(plan.order_N.numel(), device=plan.order_N.device)
        output_TKD = expert_output.index_select(0, position_N).view(
            *record.top_k_weights.shape, expert_output.shape[-1]
        )
        return (output_TKD * record.top_k_weights.unsqueeze(-1)).sum(1).to(record.dtype)
