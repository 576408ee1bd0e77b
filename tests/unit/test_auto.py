"""auto keeps the fastest, says why others are out, leaves no gradient behind, and is safe inside checkpointing."""

import time

import pytest
import torch

from hf_fsdpturbo.dispatch import auto
from hf_fsdpturbo.dispatch.auto import AutoDispatcher, Timing, time_dispatchers
from tests.unit.test_recompute import build, enable, gradients, off


@pytest.fixture(autouse=True)
def nothing_decided(monkeypatch):
    monkeypatch.setattr(auto, "_decisions", {})


def step(leaf, pause):
    def run():
        time.sleep(pause)
        return leaf * 2

    return run


def test_keeps_the_fastest():
    leaf = torch.ones(4, 2, requires_grad=True)
    steps = {"slow": step(leaf, 0.02), "quick": step(leaf, 0.0), "middle": step(leaf, 0.008)}
    timing = time_dispatchers(steps, torch.ones(4, 2), {"mc2": "no such hardware"})
    assert timing.fastest == "quick"
    assert timing.milliseconds["slow"] >= 20
    assert "mc2      not usable: no such hardware" in timing.table()
    assert leaf.grad is None


def test_tie_goes_to_the_first():
    assert Timing({"a": 1.0, "b": 1.0}, {}).fastest == "a"


def test_unusable_ones_are_named():
    dispatcher = AutoDispatcher(None, 8)
    assert list(dispatcher.candidates) == ["fused", "eager"]
    assert "cannot run here" in dispatcher.reasons["mc2"]
    assert "nothing to overlap" in dispatcher.reasons["domino"]


def test_over_nodes_both_exchanges_are_candidates():
    table = Timing({"fused": 2.0, auto.ONE_STAGE: 1.0}, {"mc2": "no such hardware"}).table()
    assert f"{auto.ONE_STAGE}     1.000 ms  <- kept" in table
    assert "fused                2.000 ms" in table
    assert AutoDispatcher(None, 8, None).candidates.keys() == {"fused", "eager"}


def test_the_first_step_is_a_step_like_others(caplog):
    """Timing inside the first forward changes no gradient and decides once for both layers."""
    want = gradients(build("fused"))
    model = build("auto")
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert auto._decisions == {}  # nothing is decided without gradients
    for layer in model.model.layers:
        layer.mlp.gate.noise.manual_seed(5)
    got = gradients(model)
    assert off(got, want) < 1e-5
    assert len(auto._decisions) == 1
    assert caplog.text.count("ep_dispatcher=auto") == 1
    assert "<- kept" in caplog.text


def test_inside_checkpointing():
    from hf_fsdpturbo.dispatch.recompute import install_routing_tape

    want = gradients(build("fused"))
    model = build("auto")
    install_routing_tape(model)
    enable(model)
    assert off(gradients(model), want) < 1e-5


def test_candidates_whose_limits_show_at_the_call_are_left_out(monkeypatch):
    dispatcher = AutoDispatcher(None, 8)
    last = list(dispatcher.candidates)[-1]

    def refuse(top_k, dtype, experts):
        raise ValueError("top_k is out of range")

    monkeypatch.setattr(dispatcher.candidates[last], "check_call", refuse)
    dispatcher._drop_unusable(1, torch.float32, None)
    assert last not in dispatcher.candidates
    assert dispatcher.reasons[last] == "top_k is out of range"
