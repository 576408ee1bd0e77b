"""The start-up scale check passes on every mesh, and a wrong factor, sum or exchange ends the run on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_fsdpturbo import parallel_state
from tests.support.spawn import run_ranks
from tests.support.topologies import fresh_state, plain_arguments

LAYOUTS = {
    "ep4": {"ep_size": 4},
    "ep4_nodes": {"ep_size": 4, "ranks_per_node": 2},
    "ep2_efsdp2": {"ep_size": 2},
    "ep2_edp2": {"ep_size": 2, "efsdp_size": 1},
    "efsdp4": {"ep_size": 1},
    "edp4": {"ep_size": 1, "efsdp_size": 1},
    "hsdp2_ep2": {"ep_size": 2, "mp_replicate_size": 2},
    "cp2_ep2": {"ep_size": 2, "cp_size": 2},
    "cp2": {"ep_size": 1, "cp_size": 2, "efsdp_size": 1},
}


def _experts_undivided(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fsdpturbo.parallelize import routed_experts

    right = routed_experts.fully_shard_experts
    wrong = lambda *args, **kwargs: right(*args, **{**kwargs, "divide_factor": 1})  # noqa: E731
    monkeypatch.setattr(routed_experts, "fully_shard_experts", wrong)


def _b1_only_real_efsdp_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1 as in the reference: without a shard group there is no factor."""
    from hf_fsdpturbo.parallelize import routed_experts

    right = routed_experts.fully_shard_experts

    def wrong(module, mesh, **kwargs):
        factor = kwargs["divide_factor"] if mesh.size(mesh.ndim - 1) > 1 else 1
        return right(module, mesh, **{**kwargs, "divide_factor": factor})

    monkeypatch.setattr(routed_experts, "fully_shard_experts", wrong)


def _forced_sum_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forced sum in a shard group of one divides a second time."""
    from hf_fsdpturbo.parallelize import routed_experts

    right = routed_experts.fully_shard_experts

    def wrong(module, mesh, **kwargs):
        right(module, mesh, **kwargs)
        module.set_force_sum_reduction_for_comms(True)

    monkeypatch.setattr(routed_experts, "fully_shard_experts", wrong)


def _dense_undivided(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FSDP2 over gloo does on torch 2.7: it sums."""
    from hf_fsdpturbo.parallelize import scale_check

    right = scale_check.fully_shard

    def wrong(module, **kwargs):
        right(module, **kwargs)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM

    monkeypatch.setattr(scale_check, "fully_shard", wrong)


def _exchange_loses_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fsdpturbo.dispatch import row_exchange

    right = row_exchange._AllToAllRows.backward
    wrong = staticmethod(lambda ctx, *gradients: right(ctx, *(g * 0.5 for g in gradients)))
    monkeypatch.setattr(row_exchange._AllToAllRows, "backward", wrong)


def _another_s_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group of a rank's place taken for that of its node, and the reverse."""
    right = parallel_state.make_node_groups

    def wrong(*args, **kwargs):
        nodes = right(*args, **kwargs)
        return replace(nodes, across=nodes.inside, inside=nodes.across)

    monkeypatch.setattr(parallel_state, "make_node_groups", wrong)


FAULTS = {
    "experts_undivided": (_experts_undivided, "expert mesh", set(LAYOUTS)),
    "b1": (_b1_only_real_efsdp_divides, "expert mesh", {"ep4", "ep4_nodes", "ep2_edp2", "edp4"}),
    # and ep4 in a bf16 run: there float32 weights on one rank are FSDP's to convert; in a float32 run it has no part
    "forced_sum": (_forced_sum_always, "expert mesh", {"ep2_edp2", "edp4"}),
    "dense_undivided": (_dense_undivided, "dense mesh", set(LAYOUTS)),
    "exchange": (_exchange_loses_gradient, "expert exchange", {n for n, s in LAYOUTS.items() if s["ep_size"] > 1}),
    "nodes": (_another_s_node, "expert exchange across nodes", {"ep4_nodes"}),
}


def check_all(bf16: bool) -> dict[str, dict[str, str]]:
    """Rank function: what the check says for each fault ("" = none) and layout; "" where it passes."""
    from hf_fsdpturbo.parallelize.order import fsdp_options
    from hf_fsdpturbo.parallelize.scale_check import check_gradient_scale
    from tests.support.spawn import init_gloo

    init_gloo()
    options = fsdp_options(plain_arguments(bf16=bf16))
    said: dict[str, dict[str, str]] = {}
    for fault in ("", *FAULTS):
        said[fault] = {}
        for layout, sizes in LAYOUTS.items():
            with pytest.MonkeyPatch.context() as monkeypatch:
                if fault:
                    FAULTS[fault][0](monkeypatch)
                try:
                    check_gradient_scale(fresh_state(4, **sizes), options)
                    said[fault][layout] = ""
                except RuntimeError as error:
                    said[fault][layout] = str(error)
    return said


@pytest.fixture(scope="module", params=[False, True], ids=["fp32", "bf16"])
def said(request: pytest.FixtureRequest) -> list[dict[str, dict[str, str]]]:
    return run_ranks(check_all, 4, request.param, timeout=150)


def test_passes_on_every_mesh(said):
    for rank in said:
        assert not any(rank[""].values()), rank[""]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught_on_every_rank(said, fault: str, request: pytest.FixtureRequest):
    _, where, caught_in = FAULTS[fault]
    if fault == "forced_sum" and request.node.callspec.params["said"]:
        caught_in = caught_in | {"ep4", "ep4_nodes"}
    for rank in said:
        raised = {layout for layout, message in rank[fault].items() if message}
        assert raised == caught_in
        for layout in raised:
            message = rank[fault][layout]
            for part in (where, "gloo", torch.__version__, "Gradient scale check failed"):
                assert part in message, (layout, message)
            # A wrong exchange makes expert gradients wrong too; the other faults stay where they are.
            meshes = {"expert mesh", "dense mesh", "expert exchange"}
            others = {"dense mesh"} if fault == "exchange" else {name for name in meshes if name not in where}
            assert not any(other in message for other in others), (layout, message)


def test_message_names_the_factor(said):
    """Four ranks feed 1, 2, 3, 4, so the mean is 2.5; undivided gradients are four times that."""
    message = said[0]["experts_undivided"]["ep2_efsdp2"]
    assert "off by 3 of its value 2.5" in message
