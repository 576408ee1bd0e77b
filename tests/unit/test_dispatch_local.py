"""Dispatchers in one process: a group of one communicates nothing and still equals the module's own forward."""

import logging

import pytest
import torch

from hf_fsdpturbo import compat
from hf_fsdpturbo.arguments.params import DISPATCHER_NAMES
from hf_fsdpturbo.dispatch.dispatcher import DISPATCHERS, get_dispatcher
from hf_fsdpturbo.dispatch.packed_rows import PackedLayout
from hf_fsdpturbo.sharding.expert_parallel import ModuleExperts
from tests.distributed.test_dispatchers import MODULES, all_inputs, relative


def run(name, module_name="qwen", num_experts=8, dtype=torch.float32, tokens=19, change=None):
    inputs = all_inputs(1, [tokens], 2, num_experts, "random")[0]
    results = []
    for ours in (False, True):
        module = MODULES[module_name](num_experts).to(dtype)
        hidden, index, weights, gradient = inputs
        hidden, weights = (t.to(dtype).clone().requires_grad_() for t in (hidden, weights))
        if ours:
            experts = ModuleExperts(module, module.forward, num_experts)
            if change:
                change(experts)
            out = get_dispatcher(name)(None, num_experts)(hidden, index, weights, experts)
        else:
            out = module(hidden, index, weights)
        out.backward(gradient.to(dtype))
        results.append([out.detach(), hidden.grad, weights.grad, *(p.grad for p in module.parameters())])
    return results


def test_table_has_every_name():
    assert set(DISPATCHERS) == set(DISPATCHER_NAMES)
    with pytest.raises(ValueError, match="'no' is not available"):
        get_dispatcher("no")


@pytest.mark.parametrize("name", ["eager", "fused", "domino"])
@pytest.mark.parametrize("module_name", ["qwen", "gpt_oss"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_equals_the_module(name, module_name, dtype, tolerance):
    want, got = run(name, module_name, dtype=dtype)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert relative(a, b) < tolerance


@pytest.mark.parametrize("name", ["eager", "fused"])
def test_bfloat16(name):
    """Within bf16's own error of float32: not further than the module's own bf16 forward, twice over."""
    exact, _ = run(name)
    want, got = run(name, dtype=torch.bfloat16)
    for a, b, c in zip(got, want, exact, strict=True):
        assert relative(a.float(), c) < max(2 * relative(b.float(), c), 1e-2)


def test_own_forward_is_said_once(caplog, monkeypatch):
    """For all layers together."""
    monkeypatch.setattr("hf_fsdpturbo.dispatch.fused._told", set())
    caplog.set_level(logging.WARNING)
    module = MODULES["gpt_oss"](8)
    experts = ModuleExperts(module, module.forward, 8)
    hidden, index, weights, _ = all_inputs(1, [5], 2, 8, "random")[0]
    for _ in range(2):
        get_dispatcher("fused")(None, 8)(hidden, index, weights, experts)
    assert caplog.text.count("own forward runs inside the fused exchange") == 1


@pytest.mark.skipif(
    not compat.has_cpu_grouped_mm(), reason=f"torch {torch.__version__} has no grouped_mm on CPU, so no plain path"
)
def test_a_forgotten_weight_would_be_seen():
    """The fault put back: experts whose gate and up halves are swapped."""

    def swap(experts):
        right = experts.weights
        experts.weights = lambda: (right()[0].roll(right()[0].shape[1] // 2, 1), right()[1])

    want, got = run("fused", change=swap)
    assert relative(got[0], want[0]) > 0.1


@pytest.mark.parametrize(("hidden", "top_k", "dtype"), [
    (2048, 8, torch.bfloat16), (16, 2, torch.float32), (17, 3, torch.float64), (9, 5, torch.bfloat16),
    (30, 7, torch.float32),
])  # fmt: skip
def test_packed_parts_do_not_overlap(hidden, top_k, dtype):
    layout = PackedLayout(hidden, top_k, dtype)
    packed = torch.zeros(3, layout.width, dtype=dtype)
    rows, slots = torch.randn(3, hidden).to(dtype), torch.randint(-1, 99, (3, top_k)).int()
    weights = torch.rand(3, top_k).to(layout.weight_dtype)
    layout.rows(packed).copy_(rows)
    layout.slots(packed).copy_(slots)
    layout.weights(packed).copy_(weights)
    assert torch.equal(layout.rows(packed), rows)
    assert torch.equal(layout.slots(packed), slots)
    assert torch.equal(layout.weights(packed), weights)
    assert layout.width * dtype.itemsize % 64 == 0
