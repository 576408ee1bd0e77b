"""Activation checkpointing under a router whose recompute would decide otherwise: noise on the logits, four-way
ties."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from hf_fsdpturbo.dispatch import recompute
from hf_fsdpturbo.dispatch.dispatcher import get_dispatcher
from hf_fsdpturbo.dispatch.recompute import current_tape, find_routers, install_routing_tape
from hf_fsdpturbo.sharding.expert_parallel import ModuleExperts

NOISE = 1e-7
NUM_EXPERTS = 8


class NoisyRouter(Qwen3MoeTopKRouter):
    """The upstream router with logits that differ a little at every call, as on a device whose kernels do."""

    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        logits = F.linear(hidden_states, self.weight)
        logits = logits + NOISE * torch.randn(logits.shape, generator=self.noise)
        probabilities = F.softmax(logits, dtype=torch.float, dim=-1)
        values, indices = torch.topk(probabilities, self.top_k, dim=-1)
        if self.norm_topk_prob:
            values /= values.sum(dim=-1, keepdim=True)
        self.seen.append(indices)
        return logits, values.to(logits.dtype), indices


def build(dispatcher):
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        moe_intermediate_size=16, num_experts=NUM_EXPERTS, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).train()
    for module in model.modules():
        if isinstance(module, Qwen3MoeTopKRouter):
            module.__class__ = NoisyRouter
            module.noise = torch.Generator().manual_seed(5)
            module.seen = []
            with torch.no_grad():  # two groups of four equal rows
                module.weight.copy_(torch.randn(2, 32).repeat_interleave(4, 0) * 0.3)
        if type(module).__name__ == "Qwen3MoeExperts":
            experts = ModuleExperts(module, module.forward, NUM_EXPERTS)
            route = get_dispatcher(dispatcher)(None, NUM_EXPERTS)
            module.forward = functools.partial(route, experts=experts)
    return model


def gradients(model, forwards=1):
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(forwards):
        ids = torch.randint(0, 64, (3, 20), generator=generator)
        losses.append(model(input_ids=ids, labels=ids).loss)
    sum(losses).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def router_gradients(model):
    """The routers' share, where a wrong recompute shows: the rest of the model drowns it."""
    gradients(model)
    return torch.cat([layer.mlp.gate.weight.grad.flatten() for layer in model.model.layers])


def off(got, want):
    return ((got - want).norm() / want.norm()).item()


def enable(model, **kwargs):
    model.activation_checkpointing_enable({"use_reentrant": False, **kwargs})


def taped(dispatcher):
    model = build(dispatcher)
    install_routing_tape(model)
    enable(model)
    return model


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("dispatcher", ["eager", "fused"])
def test_replayed_routing(dispatcher, forwards):
    want = gradients(build(dispatcher), forwards)
    model = build(dispatcher)
    assert len(install_routing_tape(model)) == 2
    enable(model)
    got = gradients(model, forwards)
    assert off(got, want) < 1e-5
    assert off(router_gradients(taped(dispatcher)), router_gradients(build(dispatcher))) < 1e-5
    router = model.model.layers[0].mlp.gate
    assert len(router.seen) == 2 * forwards  # it did run again
    assert current_tape() is None


def test_every_recompute_sees_the_forwards_indices():
    model = build("fused")
    install_routing_tape(model)
    enable(model)
    gradients(model)
    for layer in model.model.layers:
        first, second = layer.mlp.gate.seen
        assert torch.equal(first, second)


def test_no_checkpointing_no_tape():
    """Installed but not switched on, or in eval: nothing is intercepted, values are upstream's own."""
    want = gradients(build("fused"))
    model = build("fused")
    install_routing_tape(model)
    assert torch.equal(gradients(model), want)


# What looks right and is not: each put back, and seen.


def test_without_a_tape_it_breaks():
    model = build("fused")
    enable(model)
    try:
        assert off(router_gradients(model), router_gradients(build("fused"))) > 0.1
    except torch.utils.checkpoint.CheckpointError:
        pass


def test_plan_alone_is_wrong(monkeypatch):
    """Replaying the dispatcher's plan but not the router's choice sends router gradients to other experts."""
    want = router_gradients(build("fused"))
    monkeypatch.setattr(recompute, "_tape_router", lambda router: None)
    model = build("fused")
    install_routing_tape(model)
    enable(model)
    assert off(router_gradients(model), want) > 0.1


def test_saving_topk_by_policy_is_wrong():
    """Selective checkpointing that keeps top-k's outputs keeps values that the router then normalises in place."""

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.topk.default else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)

    want = router_gradients(build("eager"))
    model = build("eager")
    model._set_gradient_checkpointing(
        enable=True,
        gradient_checkpointing_func=functools.partial(checkpoint, use_reentrant=False, context_fn=contexts),
    )
    assert off(router_gradients(model), want) > 0.1


def test_reentrant_and_own_contexts_are_refused():
    model = build("fused")
    install_routing_tape(model)
    with pytest.raises(ValueError, match="use_reentrant"):
        model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="context_fn"):
        enable(model, context_fn=recompute.tape_contexts)


def test_kept_graph_recomputes_twice():
    model = build("fused")
    install_routing_tape(model)
    enable(model)
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(2))
    loss = model(input_ids=ids, labels=ids).loss
    parameter = model.model.layers[0].mlp.gate.weight
    (first,) = torch.autograd.grad(loss, parameter, retain_graph=True)
    (second,) = torch.autograd.grad(loss, parameter)
    assert off(second, first) < 1e-5


def test_a_decision_the_forward_did_not_take_is_an_error():
    forward, again = recompute.tape_contexts()
    with forward:
        assert recompute.record_or_replay(lambda: 1) == 1
    with again:
        assert recompute.record_or_replay(lambda: 2) == 1
        with pytest.raises(RuntimeError, match="not deterministic"):
            recompute.record_or_replay(lambda: 3)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "gpt_oss", "qwen3_5_moe"])
def test_routers_of_other_families_are_found(family):
    """The modules that choose experts, wherever the family keeps its top-k; never an attention or an indexer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 8,
    }  # fmt: skip
    config = AutoConfig.for_model(family)
    config = getattr(config, "text_config", config)
    for name, value in sizes.items():
        setattr(config, name, value)
    config.first_k_dense_replace = 0
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    routers = find_routers(model)
    assert len(routers) == 2, sorted(routers)
    assert not any("attn" in name for name in routers)


def test_experts_of_another_name():
    """A spec may name them otherwise: their router is found by the name of the experts module."""

    class Router(torch.nn.Module):
        def forward(self, x):
            return torch.topk(x, 2)

    block = torch.nn.Module()
    block.gate, block.moe_experts = Router(), torch.nn.Linear(2, 2)
    model = torch.nn.ModuleList([block])
    assert not find_routers(model)
    assert list(find_routers(model, ["0.moe_experts"])) == ["0.gate"]
