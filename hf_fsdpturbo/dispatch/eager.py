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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_fsdpturbo.dispatch.dispatcher import Dispatcher, LocalExperts
from hf_fsdpturbo.dispatch.recompute import record_or_replay
from hf_fsdpturbo.dispatch.row_exchange import all_to_all_rows


@dataclass(frozen=True)
class EagerPlan:
    """Where rows go: no gradient, no floating point. Both splits are rows per rank of the group."""

    order_N: Tensor
    send_splits: list[int]
    receive_splits: list[int]
    local_expert_R: Tensor


class EagerDispatcher(Dispatcher):
    """Works on any device with any experts module; every other dispatcher is compared with it."""

    takes_float32 = True

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

    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: LocalExperts
    ) -> Tensor:
        """See :class:`hf_fsdpturbo.dispatch.dispatcher.Dispatcher`: one row a pair travels, its weight stays home."""
        plan = self.plan(top_k_index)
        compute = experts.compute_dtype if hidden_states.dtype == torch.float32 else hidden_states.dtype
        rows_ND = _CopyRows.apply(hidden_states, plan.order_N, top_k_index.shape[1], compute)
        rows_RD = self._exchange(rows_ND, plan.receive_splits, plan.send_splits)
        output_RD = experts.forward_rows(rows_RD, plan.local_expert_R, None)
        output_ND = self._exchange(output_RD, plan.send_splits, plan.receive_splits)
        return weigh_and_sum(output_ND, plan.order_N, top_k_weights, hidden_states.dtype)

    def _exchange(self, rows: Tensor, output_splits: list[int], input_splits: list[int]) -> Tensor:
        if self.group is None or self.group_size == 1:
            return rows
        return all_to_all_rows(rows, output_splits, input_splits, self.group)


class _CopyRows(torch.autograd.Function):
    """``hidden_TD`` in another dtype, a copy for each of K pairs, in their order; the K gradients add in float32.

    Gathered back to their tokens and summed there: no additions into one row, whose order would be anybody's.
    """

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, order_N: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.top_k, ctx.dtype = top_k, hidden_TD.dtype
        return hidden_TD.to(dtype).index_select(0, order_N // top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (order_N,), (gradient_ND,) = ctx.saved_tensors, gradients
        gradient_TKD = gradient_ND.index_select(0, _inverse(order_N)).unflatten(0, (-1, ctx.top_k))
        wide = torch.promote_types(gradient_ND.dtype, torch.float32)
        return gradient_TKD.sum(1, dtype=wide).to(ctx.dtype), None, None, None


def _inverse(order_N: Tensor) -> Tensor:
    position_N = torch.empty_like(order_N)
    position_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return position_N


def weigh_and_sum(output_ND: Tensor, order_N: Tensor, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo the sort, weigh and sum over K: pairs that came home, sorted by expert, to ``[T, D]`` in ``dtype``.

    Args:
        output_ND: the experts' output, one row a pair.
        order_N: which pair each row is.
        top_k_weights: ``[T, K]``.
        dtype: of the result; products of a float32 one are float32, whatever the weights are.
    """
    output_TKD = output_ND.index_select(0, _inverse(order_N)).view(*top_k_weights.shape, output_ND.shape[-1])
    weights_TK = top_k_weights.float() if dtype == torch.float32 else top_k_weights
    return (output_TKD * weights_TK.unsqueeze(-1)).sum(1).to(dtype)
