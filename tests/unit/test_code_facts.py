"""Facts read from byte code and source: found where a family is known to need them, never a silent no elsewhere.

Each family's facts are written out here. A release that hides one (a decorator, a function moved to another file)
fails by the family's name; a decorator put in front of a forward is a named error or warning.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_fsdpturbo.code_facts import HiddenCode, HiddenCodeWarning, forward_of, function_of, functions_of
from hf_fsdpturbo.context_parallel.exactness import _names_its_window, _slides, attention_modules, check_model
from hf_fsdpturbo.context_parallel.local_attention import EAGER
from hf_fsdpturbo.context_parallel.sharded_head import install_sharded_head
from hf_fsdpturbo.dispatch.recompute import find_routers
from hf_fsdpturbo.kernels.rebinding import CONV, RECURRENT, ROTARY, RULE, linear_attention_layers, scope_of
from hf_fsdpturbo.lm_head import install_fused_head
from hf_fsdpturbo.packing.prepared_masks import _keywords_given, masks_ignore_documents
from hf_fsdpturbo.packing.text_models import text_models
from hf_fsdpturbo.telemetry.real_tokens import RealTokens
from hf_fsdpturbo.telemetry.router_entropy import RouterEntropy, _is_sigmoid
from tests.support.tiny_models import tiny_config

# For each tiny family: softmax layers, gated-delta-rule layers, routers (DeepSeek's first layer is dense), whether the
# attention names
# its window, whether its file makes window masks, whether its masks ignore documents.
FACTS = {
    "qwen3_moe": {"softmax": 2, "linear": 0, "routers": 2, "window": True, "slides": True, "ignores": False},
    "mixtral": {"softmax": 2, "linear": 0, "routers": 2, "window": True, "slides": True, "ignores": False},
    "deepseek_v3": {"softmax": 2, "linear": 0, "routers": 1, "window": False, "slides": False, "ignores": False},
    "gpt_oss": {"softmax": 2, "linear": 0, "routers": 2, "window": True, "slides": True, "ignores": True},
    "qwen3_5_moe": {"softmax": 1, "linear": 1, "routers": 2, "window": False, "slides": False, "ignores": False},
}


def on_meta(family: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family))


def facts(family: str) -> dict[str, Any]:
    model = on_meta(family)
    attention = list(attention_modules(model).values())
    base = text_models(model)[0]
    return {
        "softmax": len(attention),
        "linear": sum(1 for _ in linear_attention_layers(model)),
        "routers": len(find_routers(model)),
        "window": any(_names_its_window(module) for module in attention),
        "slides": any(_slides(module, None) for module in attention),
        "ignores": masks_ignore_documents(base),
    }


@pytest.mark.parametrize("family", FACTS)
@pytest.mark.filterwarnings("error::hf_fsdpturbo.code_facts.HiddenCodeWarning")
def test_facts_of_a_family(family: str):
    assert facts(family) == FACTS[family]


@pytest.mark.parametrize("family", FACTS)
def test_masks_are_made_in_the_forward_we_read(family: str):
    """Otherwise "its masks do not ignore documents" would mean that we looked in the wrong place."""
    given = _keywords_given(text_models(on_meta(family))[0])
    assert any({"attention_mask", "inputs_embeds", "config"} <= names for names in given)


def test_globals_of_linear_attention_and_rotary_embedding():
    """The names that kernels are bound to, in the file that calls them."""
    _, layer = next(linear_attention_layers(on_meta("qwen3_5_moe")))
    assert {RULE, RECURRENT, CONV} <= (scope_of(layer, RULE) or {}).keys()
    for family in FACTS:
        rotary = [module for module in on_meta(family).modules() if scope_of(module, ROTARY) is not None]
        # DeepSeek calls its interleaved form under another name, chosen by the config
        assert len(rotary) == FACTS[family]["softmax"], family


@pytest.mark.parametrize("family", FACTS)
def test_eager_attention_of_a_family(family: str):
    """Each file has its own, which knows the family's sinks and caps."""
    for module in attention_modules(on_meta(family)).values():
        assert callable(forward_of(module, "its file").__globals__[EAGER])


def hiding(function):
    """A decorator that does not say what it wraps."""

    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def telling(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Callable:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


HIDDEN = {"wrapper": hiding, "callable": Callable, "partial": functools.partial, "builtin": lambda function: len}


class Block(nn.Module):
    def forward(self, x):
        return torch.topk(x, 2)


@pytest.mark.parametrize("how", HIDDEN)
def test_hidden_code_is_a_named_error(how: str):
    with pytest.raises(HiddenCode, match=r"Block\.forward cannot be read .* cannot tell the time"):
        function_of(HIDDEN[how](Block.forward), "Block.forward", "the time")


def test_decorators_that_say_what_they_wrap_are_looked_through():
    assert function_of(telling(telling(Block.forward)), "", "") is Block.forward
    assert function_of(Block().forward, "", "") is Block.forward
    assert len(functions_of(telling(telling(Block.forward)), "", "")) == 3


def test_local_functions_that_do_not_hand_on_are_read():
    """Classes made in a function, and forwards that close over a function, as our fused ones do."""

    def fused(self, x):
        return hiding(x)

    class Local(nn.Module):
        def forward(self, *args):
            return hiding(args)

    assert function_of(fused, "", "") is fused
    assert function_of(Local.forward, "", "") is Local.forward


def decorate(model: nn.Module, owner: str, decorator, monkeypatch) -> Any:
    """A model whose class ``owner`` has a decorated forward, until the test ends."""
    classes = {type(module) for module in model.modules() if type(module).__name__ == owner}
    (found,) = classes
    monkeypatch.setattr(found, "forward", decorator(found.forward))
    return model


@pytest.mark.parametrize("how", ["wrapper", "callable"])
@pytest.mark.parametrize("owner", ["Qwen3MoeAttention", "Qwen3MoeDecoderLayer"])
def test_context_parallelism_refuses_what_it_cannot_read(owner, how, monkeypatch):
    model = decorate(on_meta("qwen3_moe"), owner, HIDDEN[how], monkeypatch)
    with pytest.raises(HiddenCode, match=f"{owner}.forward cannot be read"):
        check_model(model, 2)


def test_context_parallelism_looks_through_wraps(monkeypatch):
    model = decorate(on_meta("qwen3_moe"), "Qwen3MoeAttention", telling, monkeypatch)
    check_model(model, 2)
    assert len(attention_modules(model)) == FACTS["qwen3_moe"]["softmax"]


def test_kernels_warn_of_layers_they_cannot_read(monkeypatch):
    """As in silence before: no linear attention found, the slow rule runs."""
    model = decorate(on_meta("qwen3_5_moe"), "Qwen3_5MoeGatedDeltaNet", hiding, monkeypatch)
    with pytest.warns(HiddenCodeWarning, match=r"Qwen3_5MoeGatedDeltaNet\.forward cannot be read .*" + RULE):
        assert list(linear_attention_layers(model)) == []


def test_packed_documents_warn_of_a_model_they_cannot_read(monkeypatch):
    model = decorate(on_meta("gpt_oss"), "GptOssModel", hiding, monkeypatch)
    with pytest.warns(HiddenCodeWarning, match=r"GptOssModel\.forward cannot be read .* documents apart"):
        assert not masks_ignore_documents(model.model)


def test_packed_documents_warn_of_a_forward_without_masks(monkeypatch):
    def elsewhere(function):
        def forward(self, input_ids=None, position_ids=None):
            return self.run_all(input_ids, position_ids=position_ids)

        return forward

    model = decorate(on_meta("gpt_oss"), "GptOssModel", elsewhere, monkeypatch)
    with pytest.warns(HiddenCodeWarning, match="GptOssModel.forward calls no mask function"):
        assert not masks_ignore_documents(model.model)


def test_packed_documents_warn_of_a_forward_without_source(monkeypatch):
    scope: dict[str, Any] = {}
    exec("def forward(self, input_ids=None): pass", scope)
    model = decorate(on_meta("gpt_oss"), "GptOssModel", lambda _: scope["forward"], monkeypatch)
    with pytest.warns(HiddenCodeWarning, match="GptOssModel.forward has no source"):
        assert not masks_ignore_documents(model.model)


def test_experts_whose_router_hides_are_warned_of(monkeypatch):
    model = on_meta("qwen3_moe")
    decorate(model, "Qwen3MoeTopKRouter", hiding, monkeypatch)
    with pytest.warns(HiddenCodeWarning, match=r"no router of model\.layers\.\d\.mlp\.experts found"):
        assert find_routers(model) == {}


def test_routers_behind_two_decorators_are_found(monkeypatch):
    model = on_meta("qwen3_moe")
    decorate(model, "Qwen3MoeTopKRouter", lambda function: telling(telling(function)), monkeypatch)
    assert len(find_routers(model)) == 2


def test_the_fused_head_behind_a_decorator():
    """TRL's own forward says that it wraps the model's, so it is asked for by name along the whole chain."""
    model = on_meta("qwen3_moe")

    def fused(fused_lm_head=False, **kwargs):
        return None

    fused.__wrapped__ = type(model).forward  # type: ignore[attr-defined]
    model.forward = telling(fused)
    with pytest.raises(ValueError, match="no cut forward"):  # the head is seen; the rest is missing here
        install_sharded_head(model)
    model.forward = hiding(fused)
    with pytest.raises(HiddenCode, match="fused LM head"):
        install_sharded_head(model)


def test_a_forward_without_the_fused_head_is_left_alone():
    """Ours is put where TRL's is, on the instance, also behind a decorator that says what it wraps."""
    from trl.trainer.utils import add_fused_lm_head

    model = on_meta("qwen3_moe")
    assert not install_fused_head(model)
    assert "forward" not in vars(model)
    add_fused_lm_head(model)
    model.forward = telling(model.forward)
    theirs = model.forward
    assert install_fused_head(model)
    assert model.forward.__wrapped__ is theirs
    model.forward = hiding(theirs)
    with pytest.raises(HiddenCode, match="fused LM head"):
        install_fused_head(model)


@pytest.mark.parametrize("family", FACTS)
def test_routers_that_score_by_sigmoid(family: str):
    model = on_meta(family)
    entropy = RouterEntropy(model, RealTokens(torch.device("cpu")), torch.device("cpu"))
    assert entropy.routers == FACTS[family]["routers"]
    found = {_is_sigmoid(router) for router, _ in entropy._routers}
    assert found == {family == "deepseek_v3"}
