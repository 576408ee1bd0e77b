"""Specs: the pattern language, the registry, Transformers' expert plans; every built-in pattern matches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_fsdpturbo import FSDPTurboEPModelSpec, model_spec
from hf_fsdpturbo.model_spec import name_matches
from tests.support.tiny_models import FAMILIES, tiny_config


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("model.layers.{*}.mlp.experts", "model.layers.0.mlp.experts", True),
        ("model.layers.{*}.mlp.experts", "model.layers.127.mlp.experts", True),
        ("model.layers.{*}.mlp.experts", "model.layers.x.mlp.experts", False),
        ("model.layers.{*}.mlp.experts", "model.layers..mlp.experts", False),
        ("model.layers.{*}.mlp.experts", "model.layers.0.1.mlp.experts", False),
        ("model.layers.{*}.mlp.experts", "model.layers.0.mlp.experts.gate", False),  # whole name
        ("model.layers.{*}.mlp.experts", "a.model.layers.0.mlp.experts", False),
        ("model.layers.{*}.mlp.experts", "modelxlayers.0.mlp.experts", False),  # a dot is a dot
        ("layers.{2-11}.mlp", "layers.2.mlp", True),
        ("layers.{2-11}.mlp", "layers.11.mlp", True),
        ("layers.{2-11}.mlp", "layers.10.mlp", True),
        ("layers.{2-11}.mlp", "layers.12.mlp", False),
        ("layers.{2-11}.mlp", "layers.1.mlp", False),
        ("layers.{2-11}.mlp", "layers.110.mlp", False),
        ("*.experts", "model.layers.0.mlp.experts", True),
        ("*.experts", "experts", False),
        ("layer?.mlp", "layer7.mlp", True),
        ("layer?.mlp", "layer77.mlp", False),
        ("a+b(c)[d]", "a+b(c)[d]", True),  # nothing else is special
        ("", "", True),
    ],
)
def test_pattern_language(pattern: str, name: str, fits: bool):
    assert name_matches(pattern, name) is fits


@pytest.mark.parametrize("pattern", ["layers.{}.mlp", "layers.{a-b}.mlp", "layers.{3-1}.mlp", "layers.{**}", "{1,2}"])
def test_malformed_patterns_are_refused(pattern: str):
    with pytest.raises(ValueError, match="neither"):
        name_matches(pattern, "x")
    with pytest.raises(ValueError, match="neither"):
        FSDPTurboEPModelSpec("x", (pattern,))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict:
    copy = dict(model_spec._REGISTRY)
    monkeypatch.setattr(model_spec, "_REGISTRY", copy)
    return copy


class _Config:
    model_type = "homemade"


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = _Config()
        self.blocks = nn.ModuleList(nn.ModuleDict({"experts": nn.Linear(2, 2)}) for _ in range(3))


def test_register_and_get(registry):
    with pytest.raises(ValueError, match="No FSDPTurbo EP spec is registered for model_type='homemade'"):
        FSDPTurboEPModelSpec.get(_Model())
    prepared: list[nn.Module] = []
    spec = FSDPTurboEPModelSpec.register("homemade", ep_modules=["blocks.{0-1}.experts"], prepare_fn=prepared.append)
    model = _Model()
    assert FSDPTurboEPModelSpec.get(model) is spec
    assert spec.ep_fsdp_modules == spec.ep_modules == ("blocks.{0-1}.experts",)
    assert list(spec.find_experts(model)) == ["blocks.0.experts", "blocks.1.experts"]
    spec.prepare(model)
    assert prepared == [model]
    with pytest.raises(ValueError, match="already has an FSDPTurbo EP spec"):
        FSDPTurboEPModelSpec.register("homemade", ep_modules=["x"])


def test_patterns_that_match_nothing_are_an_error(registry):
    spec = FSDPTurboEPModelSpec.register("homemade", ep_modules=["nowhere.{*}"])
    with pytest.raises(ValueError, match=r"nowhere\.\{\*\}.*_Model"):
        spec.find_experts(_Model())


@pytest.mark.parametrize("patterns", [["blocks.{*}"], ["no.such.module"], ["blocks.{0-1}.experts"]])
def test_ep_fsdp_modules_must_be_the_experts(registry, patterns: list[str]):
    """The block round them would leave its other parameters unreduced over ep (B2)."""
    spec = FSDPTurboEPModelSpec.register("homemade", ep_modules=["blocks.{*}.experts"], ep_fsdp_modules=patterns)
    with pytest.raises(ValueError, match=r"ep_fsdp_modules .* must name the experts .*differ in \['blocks"):
        spec.find_experts(_Model())


def test_ep_fsdp_modules_in_other_words(registry):
    spec = FSDPTurboEPModelSpec.register("homemade", ep_modules=["blocks.{*}.experts"], ep_fsdp_modules=["*.experts"])
    assert len(spec.find_experts(_Model())) == 3


def _on_meta(config):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_each_family(family: str):
    """Experts of every MoE layer, nothing else: no router, no shared expert."""
    model = _on_meta(tiny_config(family, layers=3))
    found = FSDPTurboEPModelSpec.get(model).find_experts(model)
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    by_name = {n for n, m in model.named_modules() if n.endswith(".experts") and "shared" not in n}
    assert set(found) == by_name
    dense_first = 1 if family == "deepseek_v3" else 0
    assert len(found) == 3 - dense_first
    assert all(name.split(".")[-2] in (block, "mlp") for name in found)
    for module in found.values():
        assert {parameter.shape[0] for parameter in module.parameters()} == {8}


def test_built_in_names():
    assert FSDPTurboEPModelSpec.get(_on_meta(tiny_config("qwen3_moe"))).ep_modules == ("model.layers.{*}.mlp.experts",)
    spec = model_spec._REGISTRY["qwen3_5_moe"]
    assert "model.language_model.layers.{*}.mlp.experts" in spec.ep_modules
    assert spec.ep_fsdp_modules == spec.ep_modules, "EFSDP wraps the experts themselves, not the block (B2)"


def test_qwen3_5_vision_language_model_and_its_text_model():
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = tiny_config("qwen3_5_moe", layers=2)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    with torch.device("meta"):
        whole = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config=vision))
    found = FSDPTurboEPModelSpec.get(whole).find_experts(whole)
    assert list(found) == [f"model.language_model.layers.{i}.mlp.experts" for i in range(2)]
    alone = _on_meta(text)
    found = FSDPTurboEPModelSpec.get(alone).find_experts(alone)
    assert list(found) == [f"model.layers.{i}.mlp.experts" for i in range(2)]


def test_qwen3_moe_experts_get_hidden_size():
    """Of sparse layers only; a dense layer has none."""
    model = _on_meta(tiny_config("qwen3_moe", layers=2, mlp_only_layers=[0]))
    spec = FSDPTurboEPModelSpec.get(model)
    spec.prepare(model)
    assert list(spec.find_experts(model)) == ["model.layers.1.mlp.experts"]
    experts = model.model.layers[1].mlp.experts
    assert experts.hidden_size == experts.hidden_dim == 32


def test_a_dense_model_has_no_spec():
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ValueError, match=r"model_type='llama'.*ep_size=1"):
        FSDPTurboEPModelSpec.get(_on_meta(LlamaConfig(vocab_size=16, **sizes)))


def test_a_dense_model_of_an_expert_family():
    """Every layer dense by ``mlp_only_layers``: nothing to route at ep_size 1, refused above."""
    from transformers import AutoModelForCausalLM

    from hf_fsdpturbo.model_spec import find_experts

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe", mlp_only_layers=[0, 1]))
    assert find_experts(model, 1) == {}
    with pytest.raises(ValueError, match="no module of"):
        find_experts(model, 2)
