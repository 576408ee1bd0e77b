"""An experts module with a norm that all experts share (muse_spark): exact at any ep, whole on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.compare import distance
from tests.support.spawn import init_gloo, run_ranks

EXPERTS, WIDTH, TOKENS = 8, 8, 12  # as many experts as the norm has elements: shapes cannot tell them apart
LAYOUTS: dict[str, dict[str, int]] = {
    "ep2": {"ep_size": 2},
    "ep2_edp2": {"ep_size": 2, "efsdp_size": 1},
    "ep4": {"ep_size": 4},
    "ep1": {"ep_size": 1},
    "cp2_ep2": {"ep_size": 2, "cp_size": 2},
}


class Experts(nn.Module):
    """One matrix an expert, then the norm; Transformers' call."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weight_TKDD = self.weight[top_k_index]
        rows_TKD = self.norm(torch.einsum("td,tkde->tke", hidden_states, weight_TKDD))
        return (rows_TKD * top_k_weights[..., None]).sum(1)


def gradients(layouts: dict[str, dict[str, int]]) -> dict[str, dict[str, float]]:
    """Rank function: layout -> parameter -> distance of its gradient from the mean of every rank's whole copy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from hf_fsdpturbo import grad_norm
    from hf_fsdpturbo.parallelize.routed_experts import route_experts
    from hf_fsdpturbo.sharding.expert_parallel import check_experts
    from hf_fsdpturbo.shards import whole_tensor
    from tests.support.topologies import fresh_state

    init_gloo()
    found: dict[str, dict[str, float]] = {}
    for layout, sizes in layouts.items():
        state = fresh_state(4, **sizes)
        torch.manual_seed(0)
        experts = Experts()
        plain = copy.deepcopy(experts)
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(), "reshard_after_forward": True}
        count = check_experts(experts, "experts", sizes["ep_size"])
        route_experts(experts, count, "eager", state, options)
        torch.manual_seed(1 + dist.get_rank())
        # Rank 0 sends all to one expert: others' ranks may receive nothing from it, or nothing at all.
        index = torch.rand(TOKENS, EXPERTS).topk(2).indices if dist.get_rank() else torch.tensor([[0, 1]] * TOKENS)
        rows, weights = torch.randn(TOKENS, WIDTH), torch.rand(TOKENS, 2)
        target = torch.randn(TOKENS, WIDTH)
        for module in (experts, plain):
            (module(rows, index, weights) * target).sum().backward()
        grad_norm.average_replicated_gradients_(grad_norm.parameter_groups(experts))
        found[layout] = {}
        for (name, mine), theirs in zip(experts.named_parameters(), plain.parameters(), strict=True):
            mean = theirs.grad.clone()
            dist.all_reduce(mean)
            found[layout][name] = distance(whole_tensor(mine.grad), mean / dist.get_world_size())
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    return run_ranks(gradients, 4, LAYOUTS, timeout=60)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_the_mean_over_ranks(found, layout: str):
    assert set(found[layout]) == {"weight", "norm.weight", "norm.bias"}
    for name, off in found[layout].items():
        assert off < 1e-5, (name, off)
