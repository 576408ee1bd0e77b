"""Faults of the reference implementation put back: the parity checks must see each of them (spec section 12).

The norm's own faults (B4) are in test_grad_norm.py too, on paper; a wrong factor is also caught by the start-up check
(test_scale_check.py), which is switched off here, so that the comparison alone has to see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.distributed.test_grad_norm import _count_replicas
from tests.distributed.test_routing_corners import freeze_experts
from tests.distributed.test_scale_check import _b1_only_real_efsdp_divides
from tests.support.compare import Comparison, compare
from tests.support.reference_run import Record, Run, merge_batches, run_references, run_turbo
from tests.support.spawn import run_plain_jobs, run_ranks
from tests.support.tiny_models import texts

EDP2 = {"ep_size": 2, "dist_config": {"efsdp_size": 1}}


def _b1(monkeypatch: pytest.MonkeyPatch) -> None:
    """efsdp_size 1: nothing divides the experts' gradients."""
    _b1_only_real_efsdp_divides(monkeypatch)


def _b2(monkeypatch: pytest.MonkeyPatch) -> None:
    """EFSDP wraps the whole MoE block: router and shared expert are reduced over efsdp only, never over ep."""
    from hf_fsdpturbo.parallelize import order, routed_experts

    blocks: list[torch.nn.Module] = []
    route, wrap, outer = order.route_experts, routed_experts.fully_shard_experts, order.outer_fully_shard
    owner: dict[int, torch.nn.Module] = {}
    find = order.find_experts

    def find_and_remember(model, ep_size):
        experts = find(model, ep_size)
        owner.update({id(m): model.get_submodule(name.rpartition(".")[0]) for name, m in experts.items()})
        return experts

    def wrap_block(module, mesh, **kwargs):
        blocks.append(owner[id(module)])
        wrap(owner[id(module)], mesh, **{**kwargs, "experts": None})  # FSDP divides, as in the reference

    def outer_without_blocks(model, mesh, *, ignored, **kwargs):
        inside = {parameter for block in blocks for parameter in block.parameters()}
        return outer(model, mesh, ignored=ignored | inside, **kwargs)

    assert route is routed_experts.route_experts
    monkeypatch.setattr(order, "find_experts", find_and_remember)
    monkeypatch.setattr(routed_experts, "fully_shard_experts", wrap_block)
    monkeypatch.setattr(order, "outer_fully_shard", outer_without_blocks)


def _b4_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fsdpturbo import grad_norm

    _count_replicas(grad_norm)


def _experts_thaw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrapping makes new parameters, and new parameters require gradients."""
    from hf_fsdpturbo.parallelize import routed_experts

    shard = routed_experts.shard_experts

    def thaw(module, *args):
        experts = shard(module, *args)
        module.requires_grad_(True)
        return experts

    monkeypatch.setattr(routed_experts, "shard_experts", thaw)


def _no_sorting_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results come back in the order of experts instead of tokens."""
    from hf_fsdpturbo.dispatch import eager

    monkeypatch.setattr(eager, "weigh_and_sum", _weigh_and_sum_unsorted)


def _weigh_and_sum_unsorted(output_ND, order_N, top_k_weights, dtype):
    output = output_ND.view(*top_k_weights.shape, -1)
    return (output * top_k_weights.unsqueeze(-1)).sum(1).to(dtype)


def _efsdp_cuts_the_output_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharding the fused gate/up dim loads permuted rows, where Transformers converts slices, without an error.

    Two guards stand in front of it today: our loader converts whole sources, and compares what it has loaded.
    """
    from hf_fsdpturbo.loading import whole_sources
    from hf_fsdpturbo.sharding import expert_fsdp

    monkeypatch.setattr(expert_fsdp, "expert_shard_dim", lambda *args, **kwargs: 1)
    monkeypatch.setattr(whole_sources, "_left_to_transformers", lambda *args: True)


def _ranks_read_the_same_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axis names that accelerate's loader does not know."""
    from hf_fsdpturbo.parallel_state import FSDPTurboParallelState

    build = FSDPTurboParallelState.__init__

    def rename(self, *args, **kwargs):
        from torch.distributed.device_mesh import init_device_mesh

        build(self, *args, **kwargs)
        self.loader_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("fsdp", "ep"))

    monkeypatch.setattr(FSDPTurboParallelState, "__init__", rename)


def _weight_of_a_head_unit_is_read_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is an FSDP unit, but TRL's own fused head runs, which never calls it: nothing reduces its gradient."""
    from hf_fsdpturbo.trainer import head_choice

    monkeypatch.setattr(head_choice, "install_fused_head", lambda model: True)


# name -> (fault, ranks, layout, further fields of the run)
FAULTS: dict[str, tuple[Callable, int, dict, dict]] = {
    "b1": (_b1, 2, {"ep_size": 2}, {}),
    "b1_edp": (_b1, 4, EDP2, {}),
    "b2": (_b2, 2, {"ep_size": 2}, {}),
    "b4_edp": (_b4_replicas, 4, EDP2, {}),
    "b4_hsdp": (_b4_replicas, 4, {"ep_size": 2, "mp_replicate_size": 2}, {}),
    "thaw": (_experts_thaw, 2, {"ep_size": 2}, {"as_object": True, "prepare": freeze_experts}),
    "unsorted": (_no_sorting_back, 2, {"ep_size": 2}, {}),
    "output_dim": (_efsdp_cuts_the_output_dim, 4, {"ep_size": 2, "check_loading": "off"}, {}),
    "head_unit": (
        _weight_of_a_head_unit_is_read_outside, 2, {"ep_size": 2, "fused_linear_cross_entropy": "on"}, {}
    ),
    "same_data": (_ranks_read_the_same_data, 2, {"ep_size": 2}, {}),
}


def faulty_run(fault: str, run: Run) -> Record:
    """Rank function: the run with the fault in, and without the start-up check that would end it."""
    from hf_fsdpturbo.parallelize import build

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(build, "check_gradient_scale", lambda *args: None)
        FAULTS[fault][0](monkeypatch)
        return run_turbo(run)


@pytest.fixture(scope="module")
def seen(tiny) -> dict[str, tuple[Comparison, Record, Record]]:
    """Every fault's comparison with its reference; references share one process."""
    records, jobs = {}, []
    for fault, (_, ranks, turbo, fields) in FAULTS.items():
        run = Run(tiny("qwen3_5_moe"), {"text": texts(24)}, {"max_steps": 2}, turbo, **fields)
        by_rank = run_ranks(faulty_run, ranks, fault, run, timeout=90)
        records[fault] = by_rank[0]
        jobs.append((run, ranks, merge_batches(by_rank)))
        records[fault].extra["ranks"] = by_rank
    references = dict(zip(FAULTS, run_plain_jobs(run_references, jobs, timeout=150), strict=True))
    return {name: (compare(records[name], references[name]), records[name], references[name]) for name in FAULTS}


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "same_data"])
def test_comparison_sees_it(seen, fault: str):
    comparison, _, _ = seen[fault]
    print(comparison.report)
    assert not comparison, f"{fault} went unseen:\n{comparison.report}"


@pytest.mark.parametrize("fault", ["b1", "b1_edp"])
def test_b1_makes_expert_gradients_world_times_too_large(seen, fault: str):
    """Before clipping; the clipped ones keep the ratio between experts and the rest."""
    _, record, reference = seen[fault]
    ranks = FAULTS[fault][1]
    ratio = {
        name: float(gradient.norm() / reference.gradients[0][name].norm())
        for name, gradient in record.gradients[0].items()
    }
    experts = [value for name, value in ratio.items() if ".experts." in name]
    dense = [value for name, value in ratio.items() if ".experts." not in name]
    assert max(dense) == pytest.approx(min(dense), rel=1e-3)
    assert [e / dense[0] for e in experts] == pytest.approx([ranks] * len(experts), rel=1e-3)


def test_b2_hits_router_and_shared_expert_and_lets_replicas_drift(seen):
    comparison, record, _ = seen["b2"]
    wrong = {name.split()[2] for name in comparison.failed() if name.startswith("gradient 1")}
    assert any(name.endswith("mlp.gate.weight") for name in wrong)
    assert any("shared_expert" in name for name in wrong)
    first, second = record.extra["ranks"]
    drifted = {name for name in first.digest if first.digest[name] != second.digest[name]}
    assert any(name.endswith("mlp.gate.weight") for name in drifted)


@pytest.mark.parametrize("fault", ["b4_edp", "b4_hsdp"])
def test_b4_only_the_norm_is_wrong(seen, fault: str):
    """Too large a norm clips everything harder, all alike."""
    _, record, reference = seen[fault]
    assert record.grad_norms[0] > 1.001 * reference.grad_norms[0]
    ratios = [
        float(gradient.norm() / reference.gradients[0][name].norm()) for name, gradient in record.gradients[0].items()
    ]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-3)
    assert ratios[0] < 0.999


def test_thawed_experts_are_seen(seen):
    _, record, reference = seen["thaw"]
    thawed = set(record.trainable) - set(reference.trainable)
    assert thawed
    assert all(".experts." in name for name in thawed)


def test_ranks_that_read_the_same_data_are_seen(seen):
    """Parity cannot see it (the reference replays what was read); the data can."""
    _, record, _ = seen["same_data"]
    first, second = record.extra["ranks"]
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first.batches, second.batches, strict=True))


def test_ranks_read_different_data(tiny):
    """The check that the fault above would fail: no batch twice, and together the whole data set."""
    data = {"text": texts(16)}
    run = Run(tiny("qwen3_5_moe"), data, {"max_steps": -1, "num_train_epochs": 1}, {"ep_size": 2})
    first, second = run_ranks(run_turbo, 2, run)
    rows = [tuple(row[row != 0].tolist()) for b in (*first.batches, *second.batches) for row in b["input_ids"]]
    assert len(rows) == len(set(rows)) == 16
    assert math.isclose(first.losses[0], second.losses[0])
