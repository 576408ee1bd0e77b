"""MC2: Ascend A3's all-to-all-v fused with the grouped matmul, both ways; never run on the hardware.

Written from the operators' schemas and their published limits; checked against a stand-in that computes what they
compute.

N = T*K pairs sorted by expert, A rows at the owner sorted by local expert, E / L all / local experts, D hidden, F ffn.

    rank r: N rows --[ all-to-all-v + gate_up ]--> rank q: A rows [A, 2F] -> SwiGLU -> [A, F]
    rank r: N rows <--[ down + all-to-all-v ]----- rank q                      weights and sum over K at home

The backward of each is the other one with the weight turned round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_fsdpturbo.dispatch.dispatcher import Dispatcher, LocalExperts
from hf_fsdpturbo.dispatch.eager import weigh_and_sum
from hf_fsdpturbo.dispatch.recompute import record_or_replay
from hf_fsdpturbo.node_groups import NodeGroups
from hf_fsdpturbo.ops import npu
from hf_fsdpturbo.ops.functional import swiglu

EP_SIZES = (8, 16, 32, 64, 128)
MAX_LOCAL_EXPERTS, MAX_EXPERTS, TOP_K = 32, 256, range(2, 9)
DTYPES = (torch.float16, torch.bfloat16)


def check_mc2(
    ep_size: int, num_experts: int, device_type: str, top_k: int | None = None, dtype: torch.dtype | None = None
) -> None:
    """The operators' limits, before anything runs. ``top_k`` and ``dtype`` are checked where known.

    Raises:
        ValueError: every limit that is not met, by name.
    """
    problems = []
    if device_type != "npu":
        problems.append(f"the device is {device_type!r}, not an Ascend A3 NPU")
    elif not npu.device_name().startswith("Ascend910_93"):
        problems.append(f"the NPU is {npu.device_name()!r}, not an Atlas A3 (Ascend910_93..)")
    if ep_size not in EP_SIZES:
        problems.append(f"ep_size is {ep_size}, not one of {EP_SIZES}")
    if num_experts // ep_size > MAX_LOCAL_EXPERTS:
        problems.append(f"{num_experts // ep_size} experts a rank, more than {MAX_LOCAL_EXPERTS}")
    if num_experts > MAX_EXPERTS:
        problems.append(f"{num_experts} experts in all, more than {MAX_EXPERTS}")
    if top_k is not None and top_k not in TOP_K:
        problems.append(f"top-k is {top_k}, not {TOP_K.start} to {TOP_K.stop - 1}")
    if dtype is not None and dtype not in DTYPES:
        problems.append(f"the experts compute in {dtype}, not float16 or bfloat16")
    if problems:
        raise ValueError(f"ep_dispatcher='mc2' cannot run here: {'; '.join(problems)}. Use 'fused' or 'eager'.")


@dataclass(frozen=True)
class Mc2Plan:
    """Order of the pairs and host counts: ``out_counts`` E by expert, ``in_counts`` P * L by source rank."""

    order_N: Tensor
    out_counts: list[int]
    in_counts: list[int]
    ends_L: Tensor


class _SendAndMultiply(torch.autograd.Function):
    """``rows [N, A]``, ``weights [L, B, A]`` -> ``[A', B]`` at the owners."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, plan: Mc2Plan, group: ProcessGroup) -> Tensor:
        product, received = npu.alltoallv_grouped_mm(
            rows, weights, group, plan.out_counts, plan.in_counts, transposed=True
        )
        ctx.save_for_backward(received, weights)
        ctx.plan, ctx.group = plan, group
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        received, weights = ctx.saved_tensors
        plan, gradient = ctx.plan, gradients[0].contiguous()
        back = npu.grouped_mm_alltoallv(
            gradient, weights, ctx.group, plan.in_counts, plan.out_counts, transposed=False
        )
        need = ctx.needs_input_grad[1]
        return back, npu.grouped_mm(gradient.t(), received, plan.ends_L) if need else None, None, None


class _MultiplyAndReturn(torch.autograd.Function):
    """``rows [A', F]`` at the owners, ``weights [L, D, F]`` -> ``[N, D]`` at home."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, plan: Mc2Plan, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.plan, ctx.group = plan, group
        return npu.grouped_mm_alltoallv(rows, weights, group, plan.in_counts, plan.out_counts, transposed=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        plan = ctx.plan
        back, received = npu.alltoallv_grouped_mm(
            gradients[0].contiguous(), weights, ctx.group, plan.out_counts, plan.in_counts, transposed=False
        )
        need = ctx.needs_input_grad[1]
        return back, npu.grouped_mm(received.t(), rows, plan.ends_L) if need else None, None, None


class Mc2Dispatcher(Dispatcher):
    """Plain SwiGLU experts on Ascend A3; every limit is checked when it is made, top-k and dtype at the first call."""

    def __init__(self, group: ProcessGroup | None, num_experts: int, nodes: NodeGroups | None = None) -> None:
        super().__init__(group, num_experts, nodes)
        accelerator = torch.accelerator.current_accelerator()
        self._device_type = accelerator.type if accelerator is not None else "cpu"
        check_mc2(self.group_size, num_experts, self._device_type)

    def plan(self, top_k_index: Tensor) -> Mc2Plan:
        """Sort and count: one small all-to-all and one host sync, neither in recompute."""
        return record_or_replay(lambda: self._make_plan(top_k_index))

    def _make_plan(self, top_k_index: Tensor) -> Mc2Plan:
        expert_N = top_k_index.reshape(-1).long()
        counts_E = torch.zeros(self.num_experts, dtype=torch.long, device=expert_N.device)
        counts_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))
        received_PL = torch.empty_like(counts_E)
        dist.all_to_all_single(received_PL, counts_E, group=self.group)
        out_counts, in_counts = torch.stack([counts_E, received_PL]).tolist()
        ends_L = received_PL.view(self.group_size, -1).sum(0).cumsum(0).int()
        return Mc2Plan(torch.argsort(expert_N, stable=True), out_counts, in_counts, ends_L)

    def check_call(self, top_k: int, dtype: torch.dtype, experts: LocalExperts) -> None:
        """See :class:`hf_fsdpturbo.dispatch.dispatcher.Dispatcher`.

        Raises:
            ValueError: the experts are not a plain SwiGLU, or top-k or dtype is out of the operators' range.
        """
        check_mc2(self.group_size, self.num_experts, self._device_type, top_k, dtype)
        if not experts.is_plain_swiglu:
            raise ValueError(
                "ep_dispatcher='mc2' computes plain gated SwiGLU experts only. Use 'fused' or 'eager' for this model."
            )

    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: LocalExperts
    ) -> Tensor:
        """See :class:`hf_fsdpturbo.dispatch.dispatcher.Dispatcher`; raises what :meth:`check_call` does."""
        top_k = top_k_index.shape[1]
        self.check_call(top_k, hidden_states.dtype, experts)
        assert self.group is not None
        gate_up, down = experts.weights()
        plan = self.plan(top_k_index)
        rows_ND = hidden_states.index_select(0, plan.order_N // top_k)
        active = swiglu(_SendAndMultiply.apply(rows_ND, gate_up, plan, self.group), npu)
        output_ND = _MultiplyAndReturn.apply(active, down, plan, self.group)
        return weigh_and_sum(output_ND, plan.order_N, top_k_weights, hidden_states.dtype)
