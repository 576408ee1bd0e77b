"""LoRA on stacked experts, in one process: layouts, effective and merged weights, drawing, hiding, refusals."""

from __future__ import annotations

import pytest
import torch

peft = pytest.importorskip("peft")

from hf_fsdpturbo.lora.adapter import (  # noqa: E402
    add_adapter,
    check_peft_config,
    draw_adapters,
    hide,
    make_shardable,
    wrappers,
)
from hf_fsdpturbo.sharding import expert_lora  # noqa: E402
from hf_fsdpturbo.sharding.adapted_experts import AdaptedExperts  # noqa: E402
from hf_fsdpturbo.sharding.expert_lora import (  # noqa: E402
    base_module,
    expert_factors,
    merged_weight,
    to_expert_first,
    to_peft,
    wrapper_chain,
)
from hf_fsdpturbo.shards import materialize  # noqa: E402
from tests.support.tiny_models import tiny_model  # noqa: E402

EXPERTS = {
    "qwen3_moe": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "gpt_oss": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],  # stored transposed
}


def config(**changes):
    fields = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"], **changes}
    return peft.LoraConfig(**fields)


def adapted(family, seed=0, **changes):
    """A whole model with an adapter whose lora_B is not zero, in PEFT's layout."""
    model = tiny_model(family)
    changes = {"target_parameters": EXPERTS[family], **changes}
    torch.manual_seed(seed)
    peft_model = peft.get_peft_model(model, config(**changes))
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return peft_model


@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
def test_layouts_are_inverse(factor):
    weight = torch.randn(8 * 3, 5) if factor == "lora_A" else torch.randn(5, 8 * 3)
    stacked = to_expert_first(factor, weight, 8)
    assert stacked.shape == ((8, 3, 5) if factor == "lora_A" else (8, 5, 3))
    assert torch.equal(to_peft(factor, stacked), weight)


def local_weights(peft_model, view=AdaptedExperts):
    """Effective weights of the first experts module as a dispatcher sees them, and the wrappers."""
    module = peft_model.get_base_model().model.layers[0].mlp.experts
    experts = view(module, base_module(module).forward, 8)
    return experts, module


def peft_weights(peft_model):
    """The same by PEFT's own code, before the factors are stored expert first."""
    module = peft_model.get_base_model().model.layers[0].mlp.experts
    return {
        wrapper.parameter_name: (wrapper.get_param() + wrapper.get_delta_weight("default")).detach()
        for wrapper in wrapper_chain(module)
    }


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("rslora", [False, True])
def test_effective_weights_are_peft_s(family, rslora):
    peft_model = adapted(family, use_rslora=rslora)
    expected = peft_weights(peft_model)
    make_shardable(peft_model)
    experts, module = local_weights(peft_model)
    assert len(wrapper_chain(module)) == 2
    local = experts.local_parameters()
    for name, weight in expected.items():
        assert torch.allclose(local[name], weight, atol=1e-6), name
        assert not torch.allclose(local[name], base_module(module).get_parameter(name), atol=1e-3)
    with peft_model.disable_adapter():
        off = experts.local_parameters()
    assert all(torch.equal(off[name], base_module(module).get_parameter(name)) for name in expected)


@pytest.mark.parametrize("family", EXPERTS)
def test_wrong_order_of_lora_b_is_seen(family, monkeypatch):
    """The fault that trains without an error: lora_B read with the expert slowest."""

    def wrong(factor, weight, num_experts):
        if factor == "lora_B":
            return weight.reshape(weight.shape[0], num_experts, -1).permute(1, 0, 2)
        return to_expert_first(factor, weight, num_experts)

    peft_model = adapted(family)
    expected = peft_weights(peft_model)
    monkeypatch.setattr(expert_lora, "to_expert_first", wrong)
    make_shardable(peft_model)
    local = local_weights(peft_model)[0].local_parameters()
    assert not any(torch.allclose(local[name], weight, atol=1e-3) for name, weight in expected.items())


@pytest.mark.parametrize("family", EXPERTS)
def test_rows_go_through_the_adapter(family):
    """Forward and gradients of the factors equal PEFT's on the same rows; a rank without rows gets zeros, not None."""
    torch.manual_seed(0)
    rows, index = torch.randn(12, 32), torch.randint(0, 8, (12,))
    stock = adapted(family)
    module = stock.get_base_model().model.layers[0].mlp.experts
    out = module(rows, index[:, None], torch.ones(12, 1))
    out.square().sum().backward()
    mine = adapted(family)
    make_shardable(mine)
    experts, wrapped = local_weights(mine)
    found = experts.forward_rows(rows, index, None)
    found.square().sum().backward()
    assert torch.allclose(found, out, atol=1e-6)
    named = dict(module.named_parameters())
    factors = expert_factors(wrapped)
    assert len(factors) == 4
    for name, parameter in wrapped.named_parameters():
        if name in factors:
            gradient = to_peft(factors[name], parameter.grad)
            assert torch.allclose(gradient, named[name].grad, atol=1e-5, rtol=1e-4), name
            parameter.grad = None
        else:
            assert parameter.grad is None
    empty = experts.forward_rows(rows[:0].requires_grad_(), index[:0], None)
    empty.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for n, p in wrapped.named_parameters() if n in factors)


@pytest.mark.parametrize("family", EXPERTS)
def test_merged_part_is_the_part_of_the_merged_whole(family):
    peft_model = adapted(family)
    expected = peft_weights(peft_model)
    make_shardable(peft_model)
    module = peft_model.get_base_model().model.layers[0].mlp.experts
    for wrapper in wrapper_chain(module):
        a, b = (getattr(wrapper, f)["default"].weight.detach() for f in ("lora_A", "lora_B"))
        weight = wrapper.get_param().detach()
        for box in [(slice(2, 5), slice(0, weight.shape[1]), slice(3, 9)), (slice(0, 8), slice(4, 8), slice(0, 16))]:
            part = merged_weight(weight[box], wrapper, "default", a, b, box)
            assert torch.allclose(part, expected[wrapper.parameter_name][box], atol=1e-6)


# Drawing

DRAWS = {
    "experts and attention": {"target_parameters": EXPERTS["qwen3_moe"]},
    "all linear": {"target_modules": "all-linear"},
    "gaussian": {"target_parameters": EXPERTS["qwen3_moe"][:1], "init_lora_weights": "gaussian"},
    "attention": {},
    "patterns": {"rank_pattern": {"q_proj": 2}, "target_parameters": EXPERTS["qwen3_moe"]},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", DRAWS)
def test_adapters_are_drawn_as_peft_draws_them(case, dtype):
    stock_base, base = tiny_model("qwen3_moe", dtype=dtype), tiny_model("qwen3_moe", dtype=dtype).to("meta")
    torch.manual_seed(3)
    stock = peft.get_peft_model(stock_base, config(**DRAWS[case]))
    mine = add_adapter(base, config(**DRAWS[case]))
    materialize(mine, torch.device("cpu"))
    torch.manual_seed(3)
    draw_adapters(mine)
    factors = expert_factors(mine)
    expected = {n: p for n, p in stock.named_parameters() if "lora_" in n}
    found = {n: p for n, p in mine.named_parameters() if "lora_" in n}
    assert set(found) == set(expected)
    for name, parameter in expected.items():
        value = to_peft(factors[name], found[name]) if name in factors else found[name]
        assert value.dtype == parameter.dtype
        assert torch.equal(value, parameter), name
    assert all(p.requires_grad == ("lora_" in n) for n, p in mine.named_parameters())


def test_hidden_wrappers_give_the_names_of_the_checkpoint():
    base = tiny_model("qwen3_moe")
    names = list(base.state_dict())
    peft_model = add_adapter(base, config(target_modules="all-linear"))
    with_adapter = list(peft_model.state_dict())
    assert len(wrappers(base)) == 2 * 6
    show = hide(base)
    assert list(base.state_dict()) == names
    show()
    assert list(peft_model.state_dict()) == with_adapter


# Refusals


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"target_parameters": EXPERTS["qwen3_moe"], "lora_dropout": 0.05}, "lora_dropout=0"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, 'bias="none"'),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"layer_replication": [(0, 2)]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ],
)
def test_refused_configurations(changes, text):
    with pytest.raises(ValueError, match="peft_config") as caught:
        check_peft_config(config(**changes))
    assert text in str(caught.value)


def test_only_lora():
    with pytest.raises(ValueError, match="IA3"):
        check_peft_config(peft.IA3Config())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"target_parameters": ["mlp.experts.gate_proj"]}, "mlp.experts.gate_up_proj"),
        ({"target_parameters": ["experts.0.down_proj.weight"]}, "names no parameter"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
        ({"modules_to_save": ["experts"]}, "Use target_parameters"),
    ],
)
def test_refused_targets(changes, text):
    with pytest.raises(ValueError, match=text):
        add_adapter(tiny_model("qwen3_moe"), config(**changes))


def test_biases_of_experts_are_refused():
    with pytest.raises(ValueError, match="gate_up_proj_bias"):
        add_adapter(tiny_model("gpt_oss"), config(target_parameters=["mlp.experts.gate_up_proj_bias"]))
