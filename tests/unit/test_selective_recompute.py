"""What ``recompute`` keeps and where a recompute ends, in one process; the ways it could be wrong, put back.

Bits at every dispatcher and layout: ``tests/distributed/test_kept_activations.py``.
"""

import gc
import types
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_fsdpturbo.dispatch import kept_attention, recompute
from hf_fsdpturbo.ops import expert_mlp
from hf_fsdpturbo.ops import torch as ops
from hf_fsdpturbo.parallelize import kept_activations
from hf_fsdpturbo.parallelize.fused_experts import route_in_one_process
from hf_fsdpturbo.topology import Topology

TOKENS, LAYERS = 3 * 20, 2


def arguments(mode, **more):
    given = {"activation_checkpointing": mode != "none", "max_length": 20, "per_device_train_batch_size": 3, **more}
    return types.SimpleNamespace(recompute="full" if mode == "none" else mode, bf16=False, **given)


def build(mode, attention="sdpa"):
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).train()
    names = route_in_one_process(model).names
    model.lines = kept_activations.install_recompute(model, arguments(mode), Topology.resolve(1), names, "fused")
    if mode != "none":
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def loss_of(model):
    ids = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def gradients(model):
    loss_of(model).backward()
    return [parameter.grad for parameter in model.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def matmuls_of(mode, monkeypatch):
    """Grouped matmuls of one forward and backward."""
    seen, multiply = [], ops.grouped_mm
    monkeypatch.setattr(ops, "grouped_mm", lambda *args: (seen.append(1), multiply(*args))[1])
    gradients(build(mode))
    monkeypatch.setattr(ops, "grouped_mm", multiply)
    return len(seen)


@pytest.fixture
def tapes(monkeypatch):
    """Weak references to all tapes made in a test."""
    made, begin = [], recompute.RoutingTape.__init__

    def remember(tape, keeps=False):
        begin(tape, keeps)
        made.append(weakref.ref(tape))

    monkeypatch.setattr(recompute.RoutingTape, "__init__", remember)
    return made


def test_the_same_bits_and_fewer_matmuls(monkeypatch):
    want = gradients(build("none"))
    for mode in ("full", "selective"):
        assert same(gradients(build(mode)), want)
    assert matmuls_of("none", monkeypatch) == 6 * LAYERS
    assert matmuls_of("full", monkeypatch) == 7 * LAYERS
    assert matmuls_of("selective", monkeypatch) == 6 * LAYERS


def test_a_kept_graph_recomputes_twice():
    model = build("selective")
    loss, parameter = loss_of(model), model.model.layers[0].mlp.gate.weight
    (first,) = torch.autograd.grad(loss, parameter, retain_graph=True)
    (second,) = torch.autograd.grad(loss, parameter)
    assert torch.equal(first, second)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_kept_goes_with_the_backward(mode, tapes):
    """Without the garbage collector, which training keeps off."""
    model = build(mode)
    gc.disable()
    try:
        loss = loss_of(model)
        assert sum(tape() is not None for tape in tapes) == LAYERS
        loss.backward()
        del loss
        assert not [tape for tape in tapes if tape() is not None]
    finally:
        gc.enable()


def test_the_planned_memory_is_what_is_kept(tapes):
    model = build("selective")
    loss = loss_of(model)  # holds the tapes
    results = [entry for tape in tapes for entry in tape()._entries if isinstance(entry, tuple)]
    assert len(results) == 2 * LAYERS, "of each layer the up matmul and attention"
    kept = sum(tensor.nbytes for result in results for tensor in result if isinstance(tensor, torch.Tensor))
    planned = LAYERS * (kept_activations.attention_bytes(model.config, 4) + 2 * (2 * 16 * 4 + 4)) * TOKENS
    assert kept == planned
    assert f"{planned / 2**30:.2f} GiB for 3 x 20 tokens" in model.lines[0]
    del loss


def test_planned_memory_of_a_published_size():
    """Qwen3-30B-A3B's layer at 4 x 4,096 tokens in bf16: 0.375 GiB of the up matmul, 0.125 of attention."""
    config = Qwen3MoeConfig(num_attention_heads=32, head_dim=128, hidden_size=2048)
    tokens = 4 * 4096
    assert kept_activations.attention_bytes(config, 2) * tokens / 2**30 == pytest.approx(0.125, rel=0.02)
    assert kept_activations.row_bytes(2048, 8, 1, 2) == 0
    assert kept_activations.row_bytes(2048, 8, 2, 2) * tokens / 2**30 == pytest.approx(2 * 0.0625, rel=0.03)


def test_rows_of_a_token_by_hand():
    """Two choices among two ranks: half the time one rank, half the time both, so 1.5 rows."""
    assert kept_activations.row_bytes(16, 2, 2, 4) == round(1.5 * (16 * 4 + 2 * 8))


def test_eager_attention_is_said_to_run_again():
    model = build("selective", attention="eager")
    assert "0 attentions" in model.lines[0]
    assert "attention eager runs again" in model.lines[1]
    assert same(gradients(model), gradients(build("none", attention="eager")))


def test_without_checkpointing_nothing_is_said_and_nothing_kept(tapes):
    model = build("none")
    kept_activations.install_recompute(model, arguments("selective", activation_checkpointing=False),
                                       Topology.resolve(1), [], "fused")  # fmt: skip
    gradients(model)
    assert not tapes


def test_attention_with_dropout_runs_again(tapes):
    """A recompute that draws less than the forward would draw other numbers after it."""
    seen = []

    def attention(query, dropout=0.0):
        seen.append(1)
        return torch.nn.functional.scaled_dot_product_attention(query, query, query)

    query = torch.randn(1, 2, 4, 8)
    forward, again = recompute.tape_contexts(keeps=True)
    for context in (forward, again):
        with context:
            kept_attention._kept(attention)(query, dropout=0.1)
    assert not tapes[0]()._entries
    for context in (forward, again):
        with context:
            kept_attention._kept(attention)(query, dropout=0.0)
    assert len(tapes[0]()._entries) == 1
    assert len(seen) == 4


class CountAttention(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "calls"), [("full", 2 * LAYERS), ("selective", LAYERS)])
def test_attention_calls(mode, calls):
    """The layers find the wrapped function in ``ALL_ATTENTION_FUNCTIONS`` at each call."""
    model = build(mode)
    with CountAttention() as counting:
        gradients(model)
    assert counting.calls == calls


def test_torchs_operators_have_these_names():
    names = [name.partition("::")[2] for name in kept_attention.OPERATORS if name.startswith("aten::")]
    assert len(names) == 5
    for name in names:
        assert getattr(torch.ops.aten, name).default.name() == f"aten::{name}"


# What is wrong, put back, and seen.


def test_a_second_half_that_saves_makes_recompute_run_down(monkeypatch):
    forward = expert_mlp._Down.forward

    def saving(ctx, stand_in, halves):
        ctx.save_for_backward(stand_in)
        return forward(ctx, stand_in, halves)

    monkeypatch.setattr(expert_mlp._Down, "forward", staticmethod(saving))
    assert matmuls_of("full", monkeypatch) == 8 * LAYERS


def test_kept_results_that_differ_are_seen(monkeypatch):
    """The gradients do come from what is kept."""
    want, replay = gradients(build("none")), recompute.RoutingTape.record_or_replay

    def disturbed(tape, make):
        value = replay(tape, make)
        return (value[0] * 1.001, *value[1:]) if tape.replays and isinstance(value, tuple) else value

    monkeypatch.setattr(recompute.RoutingTape, "record_or_replay", disturbed)
    assert not same(gradients(build("selective")), want)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_forward_without_backward_leaves_nothing(wrong, monkeypatch, tapes):
    """Results handed out as they are kept: autograd writes onto the tape's own tensors, which then hold the graph that
    holds the tape."""
    if wrong:
        monkeypatch.setattr(kept_attention, "_detached", lambda results: results)
    gc.disable()
    try:
        loss_of(build("selective"))
        alive = sum(tape() is not None for tape in tapes)
        assert alive == (LAYERS if wrong else 0)
    finally:
        gc.enable()
