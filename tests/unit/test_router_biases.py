"""Issue 18: where routers and correction biases are, updates that even a skewed router, groups of the optimizer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_fsdpturbo.arguments.sources import PUBLIC_DEFAULTS, resolve_settings
from hf_fsdpturbo.routers.bias_update import BiasUpdate
from hf_fsdpturbo.routers.found import BIASES, find_biases, find_routers
from hf_fsdpturbo.routers.rates import ratio, refuse_other_ratio, split_groups
from hf_fsdpturbo.telemetry.expert_counts import ExpertCounts, counted_modules
from hf_fsdpturbo.telemetry.real_tokens import RealTokens
from hf_fsdpturbo.trainer.router_training import RouterTraining
from tests.support.tiny_models import VOCAB_SIZE, steer, tiny_model

E = 8
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
# By family: config fields, layers with a bias, whether it is a buffer, its dtype in a bfloat16 model.
HALF, FULL = torch.bfloat16, torch.float32
PLACES = {
    "DeepseekV3": ({"n_routed_experts": E, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}, 2, True, FULL),
    "Glm4Moe": ({"n_routed_experts": E, "first_k_dense_replace": 1}, 2, True, FULL),
    "HYV3": ({"num_experts": E, "num_local_experts": E}, None, True, FULL),
    "MiniMaxM2": ({"num_local_experts": E}, 3, True, HALF),
    "Ernie4_5_Moe": ({"moe_num_experts": E, "moe_k": 2, "moe_layer_start_index": 1}, 2, False, FULL),
    "Afmoe": ({"num_experts": E, "num_dense_layers": 1, "num_shared_experts": 1}, 2, False, FULL),
    "Laguna": ({"num_experts": E}, None, False, HALF),
    "DeepseekV4": ({"n_routed_experts": E, "mlp_layer_types": ["hash_moe", "moe", "moe"]}, 2, True, FULL),
}


def on_meta(family: str, dtype: torch.dtype, **fields):
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**COMMON, **fields})
    with torch.device("meta"):
        return getattr(transformers, f"{family}ForCausalLM")._from_config(config, dtype=dtype)


@pytest.mark.parametrize("family", PLACES)
def test_routers_and_biases_of_families(family):
    """The note in routers/found.py, by what the installed release builds."""
    fields, layers, is_buffer, dtype = PLACES[family]
    model = on_meta(family, torch.bfloat16, **fields)
    experts = {name: number for name, (_, number) in counted_modules(model).items()}
    routers, biases = find_routers(model), find_biases(model, experts)
    assert len(routers) == len(experts) > 0
    assert len(biases) == (layers or len(biases)) > 0
    buffers = {id(buffer) for buffer in model.buffers()}
    for name, bias in biases.items():
        assert bias.numel() == experts[name]
        assert (id(bias) in buffers) is is_buffer
        assert bias.dtype == dtype
        assert is_buffer or not bias.requires_grad
    named = [n for n, _ in (*model.named_parameters(), *model.named_buffers()) if n.rpartition(".")[2] in BIASES]
    assert len(named) == len(biases), "none is left out"


def test_every_family_that_mentions_a_correction_bias_calls_it_by_a_name_that_is_known():
    """What adds something to scores and chooses by them, in all modeling files."""
    import re
    from pathlib import Path

    import transformers

    chosen = re.compile(r"topk\(\s*\w+ \+ (?:self\.)?(\w+)|scores_for_choice = [\w.(), -]+ \+ (?:self\.)?(\w+)")
    found: dict[str, set[str]] = {}
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for pair in chosen.findall(path.read_text(encoding="utf-8")):
            found.setdefault("".join(pair), set()).add(path.parent.name)
    assert set(found) == set(BIASES), {name: families for name, families in found.items() if name not in BIASES}
    assert len(set.union(*found.values())) > 20


def test_a_skewed_router_is_evened():
    model = tiny_model("deepseek_v3", layers=3, n_group=1, topk_group=1).train()
    steer(model, {0: 0.05, 1: 0.03})
    device = torch.device("cpu")
    tokens = RealTokens(device)
    counts = ExpertCounts(model, tokens, device)
    tokens.attach(model)
    counts.attach()
    reader, update = counts.reader(), BiasUpdate(model, counts.layers, 0.002)
    update.begin()
    draw, most = torch.Generator().manual_seed(0), []
    for _ in range(40):
        for _ in range(2):  # the window is the step, not the micro-batch
            model(input_ids=torch.randint(3, VOCAB_SIZE, (8, 32), generator=draw))
        loads = counts.by_layer(reader.all_ranks())
        most.append(max(float(load.max() / load.double().mean()) for load in loads.values()))
        update.apply(loads)
    print(f"busiest expert over the mean: {most[0]:.2f} at first, {most[-1]:.2f} after 39 updates")
    assert most[0] > 3.5
    assert max(most[-5:]) < 1.5


def test_what_has_no_bias_or_another_one_is_refused():
    with pytest.raises(ValueError, match="qwen3_moe has no correction bias to update"):
        BiasUpdate(tiny_model("qwen3_moe"), {"model.layers.0.mlp.experts": 8}, 0.1)
    with pytest.raises(ValueError, match="has 8 entries for 6 experts"):
        BiasUpdate(tiny_model("deepseek_v3"), {"model.layers.1.mlp.experts": 6}, 0.1)


def test_groups_of_an_optimizer():
    gate, other, norm = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    groups = [{"params": [gate, other], "weight_decay": 0.1}, {"params": [norm], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    split_groups(optimizer, {gate}, 0.25)
    found = [(group["params"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [([other], 0.5, 0.1), ([norm], 0.5, 0.0), ([gate], 0.125, 0.1)]
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 0.1, 4)
    assert ratio(optimizer, {gate}) == 0.25
    refuse_other_ratio(optimizer, {gate}, 0.25)
    with pytest.raises(ValueError, match="router_lr_scale=0.5, but the checkpoint was trained with 0.25"):
        refuse_other_ratio(optimizer, {gate}, 0.5)
    alone = torch.optim.SGD([gate], lr=1.0)
    split_groups(alone, {gate}, 2.0)
    assert [(group["params"], group["lr"]) for group in alone.param_groups] == [([gate], 2.0)]
    with pytest.raises(ValueError, match="no parameter of a router trains"):
        split_groups(torch.optim.SGD([other], lr=1.0), {gate}, 0.5)


def test_an_optimizer_that_was_given_keeps_its_groups():
    config = SimpleNamespace(freeze_routers=False, router_lr_scale=0.5, router_bias_update_rate=None)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="router_lr_scale=0.5 acts on an optimizer that is made from the arguments"):
        RouterTraining(SimpleNamespace(), config).give_rates(optimizer, was_given=True)


@pytest.mark.parametrize("text", ["1e-3", "0.001", ".001", " 1.0E-3 ", 0.001])
def test_rates_from_every_source(monkeypatch, text):
    """Text of the environment, and of YAML, which takes 1e-3 for text; a number of Python."""
    given = dict.fromkeys(PUBLIC_DEFAULTS)
    if isinstance(text, str):
        monkeypatch.setenv("FSDPTURBO_ROUTER_LR_SCALE", text)
    given["router_bias_update_rate"] = text
    settings = resolve_settings(given)[0]
    assert settings["router_bias_update_rate"].value == 0.001
    assert settings["router_lr_scale"].value == (0.001 if isinstance(text, str) else 1.0)


@pytest.mark.parametrize(
    "value", ["nan", "-1", "0", "1_0", "true", True, 0.0, -0.5, float("nan"), float("inf"), [1.0]]
)
def test_rates_that_are_none(value):
    with pytest.raises(ValueError, match="router_lr_scale must be more than 0"):
        resolve_settings({**dict.fromkeys(PUBLIC_DEFAULTS), "router_lr_scale": value})


def test_settings_of_a_model_without_routers_are_refused():
    config = SimpleNamespace(freeze_routers=True, router_lr_scale=0.5, router_bias_update_rate=None)
    with pytest.raises(ValueError, match="freeze_routers, router_lr_scale: no routers were found in Linear"):
        RouterTraining(SimpleNamespace(model=nn.Linear(2, 2)), config).install()
    backend = SimpleNamespace(ep_backend="fsdp_turbo")
    config = SimpleNamespace(
        freeze_routers=False, router_lr_scale=1.0, router_bias_update_rate=0.1, fsdpturbo_params=backend
    )
    trainer = SimpleNamespace(model=tiny_model("deepseek_v3"), add_callback=lambda callback: None)
    with pytest.raises(ValueError, match="router_bias_update_rate=0.1 with ep_backend='fsdp_turbo'"):
        RouterTraining(trainer, config).install()
