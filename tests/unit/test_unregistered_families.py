"""Families without a spec: what the refusal says, by what the model holds; wrong registrations are named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_fsdpturbo import FSDPTurboEPModelSpec, model_spec


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict:
    copy = dict(model_spec._REGISTRY)
    monkeypatch.setattr(model_spec, "_REGISTRY", copy)
    return copy


def _tiny(name: str):
    """A tiny model of a family of the sweep, on meta."""
    import transformers

    from tests.families.listing import families
    from tests.families.tiny import tiny_config

    family = families()[name]
    config = tiny_config(transformers.CONFIG_MAPPING[family.model_type], name)
    with torch.device("meta"):
        return getattr(transformers, family.architecture)(config)


def test_llama4_with_images_and_its_text_model():
    import transformers

    from tests.families.tiny import tiny_config

    config = tiny_config(transformers.CONFIG_MAPPING["llama4"], "llama4_with_images")
    config.text_config.moe_layers = [0]
    with torch.device("meta"):
        whole = transformers.Llama4ForConditionalGeneration(config)
    found = FSDPTurboEPModelSpec.get(whole).find_experts(whole)
    assert list(found) == ["language_model.model.layers.0.feed_forward.experts"]
    alone = _tiny("llama4")
    found = FSDPTurboEPModelSpec.get(alone).find_experts(alone)
    assert list(found) == [name for name, _ in alone.named_modules() if name.endswith(".experts")] != []


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("nllb_moe", "model.decoder.layers.{*}.ffn.experts"),
        ("switch_transformers", "encoder.block.{*}.layer.{*}.mlp.experts"),
    ],
)
def test_separate_experts_are_not_told_to_register(name: str, where: str):
    """Decided from the model: its experts are modules."""
    with pytest.raises(ValueError, match="are separate modules") as caught:
        FSDPTurboEPModelSpec.get(_tiny(name))
    message = str(caught.value)
    assert f"({where}: 8 " in message
    assert "ep_size=1" in message
    assert "register(" not in message


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("jetmoe", "model.layers.{*}.mlp.input_linear"),
        ("dbrx", "transformer.blocks.{*}.ffn.experts.mlp"),
        ("doge", "model.layers.{*}.mlp.down_embed"),
    ],
)
def test_stacked_experts_are_told_to_register(name: str, where: str):
    with pytest.raises(ValueError, match=rf"register\('{name}'.*docs/register\.md") as caught:
        FSDPTurboEPModelSpec.get(_tiny(name))
    assert where in str(caught.value)


def test_a_dense_model_is_not_told_to_register():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    with pytest.raises(ValueError, match=r"No experts were found.*ep_size=1") as caught:
        FSDPTurboEPModelSpec.get(model)
    assert "register(" not in str(caught.value)


WRONG = {
    "no adapter": ("llama4", ["model.layers.{*}.feed_forward.experts"], r"experts: its forward takes \(hidden_states"),
    "half of the experts": (
        "jetmoe",
        ["model.layers.{*}.mlp.input_linear"],
        r"input_linear: its forward takes \(inputs",
    ),
    "the block": ("jetmoe", ["model.layers.{*}.mlp"], r"layers\.0\.mlp: its forward takes \(layer_input"),
    "an empty module": ("dbrx", ["transformer.blocks.{*}.ffn.experts"], r"ffn\.experts: .* found no parameters"),
    "flattened": ("dbrx", ["transformer.blocks.{*}.ffn.experts.mlp"], r"experts\.mlp: its forward takes \(x"),
    "separate": ("nllb_moe", ["model.{*}coder.layers.{*}.ffn.experts"], r"no module of"),
    "separate modules": ("nllb_moe", ["model.*coder.layers.{*}.ffn.experts"], r"experts: .* stacked .*ep_size=1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_patterns_name_layer_rule_and_fix(registry, case: str):
    """A ``ValueError`` before anything is sharded; never what Python says of a call that does not fit."""
    from hf_fsdpturbo.sharding.expert_parallel import check_experts

    name, patterns, message = WRONG[case]
    model = _tiny(name)
    registry.pop(model.config.model_type, None)
    spec = FSDPTurboEPModelSpec.register(model.config.model_type, ep_modules=patterns)

    def check() -> None:
        for layer, module in spec.find_experts(model).items():
            check_experts(module, layer, 2)

    with pytest.raises(ValueError, match=message):
        check()


def test_wrong_prepare_fn_is_named(registry):
    with pytest.raises(ValueError, match=r"cannot be called with one argument, the model.*prepare_fn\(model\)"):
        FSDPTurboEPModelSpec.register("homemade", ep_modules=["x"], prepare_fn=lambda: None)
    spec = FSDPTurboEPModelSpec.register("homemade", ep_modules=["x"], prepare_fn=lambda model: model.encoder)
    with pytest.raises(ValueError, match=r"prepare_fn of model_type='homemade' failed on Linear with AttributeError"):
        spec.prepare(nn.Linear(2, 2))


def test_wrong_stacks_are_named(registry):
    from hf_fsdpturbo.expert_adapters import adapt_experts
    from hf_fsdpturbo.sharding.expert_parallel import check_experts

    block = _tiny("jetmoe").model.layers[0].mlp
    adapt_experts(block, lambda b, h, i, w: h, num_experts=8, stacks=("input_linear.weight", "output.weight"))
    with pytest.raises(
        ValueError, match=r"mlp: its adapter names stacks \['output\.weight'\], but its parameters are"
    ):
        check_experts(block, "model.layers.0.mlp", 2)


ROWS = torch.ones(4, 2)
CALLS = {
    "input alone": (ROWS,),
    "a list of sizes": (ROWS, [1, 3], torch.ones(4, 1)),
    "weights for indices": (ROWS, torch.ones(4, 1), torch.ones(4, 1)),
    "one index too few": (ROWS, torch.zeros(3, 1).long(), torch.ones(3, 1)),
    "an argument more": (ROWS, torch.zeros(4, 1).long(), torch.ones(4, 1), None),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_block_that_calls_experts_otherwise_is_named(case: str):
    """Its own code decides, so it is seen in the first forward, on all ranks alike."""
    from hf_fsdpturbo.parallelize.routed_experts import RoutedForward

    routed = RoutedForward(None, None, "model.layers.1.mlp.experts")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts: called with 4 rows and .*prepare_fn"):
        routed(*CALLS[case])


def test_lora_on_stacks_of_inner_modules_is_refused():
    from peft import LoraConfig, get_peft_model

    from hf_fsdpturbo.expert_adapters import adapt_experts
    from hf_fsdpturbo.sharding.expert_parallel import check_experts

    model = _tiny("jetmoe")
    config = LoraConfig(target_parameters=["mlp.input_linear.weight"], lora_dropout=0.0)
    block = get_peft_model(model, config, low_cpu_mem_usage=True).get_base_model().model.layers[0].mlp
    stacks = ("input_linear.weight", "output_linear.weight")
    adapt_experts(block, lambda b, h, i, w: h, num_experts=8, stacks=stacks)
    with pytest.raises(ValueError, match=r"mlp: its adapter names stacks \['input_linear.weight'\].*without adapters"):
        check_experts(block, "model.layers.0.mlp", 1)
