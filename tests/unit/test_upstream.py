"""The fsdp_turbo adapter in one process: what is refused, by name, and what is passed to either API generation."""

import sys

import pytest
import torch
from torch import nn

from hf_fsdpturbo.arguments import FSDPTurboParams
from hf_fsdpturbo.sharding import fsdp_turbo
from tests.support import upstream_ranks


@pytest.fixture
def library():
    before, path = set(sys.modules), list(sys.path)
    yield upstream_ranks.configure
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "fsdp_turbo":
            del sys.modules[name]


def params(**changes):
    return FSDPTurboParams(ep_backend="fsdp_turbo", **changes)


def model():
    return nn.Sequential(nn.Linear(2, 2))


def test_a_missing_library_names_the_requirements_file():
    with pytest.raises(ValueError, match=r"ep_backend='fsdp_turbo' needs fsdp-turbo.*-r requirements/fsdpturbo\.txt"):
        fsdp_turbo.check_upstream(params(), model(), "cpu")


@pytest.mark.parametrize(
    ("generation", "field"), [("NEW", "gradient_divide_factor"), ("OLD", "_gradient_divide_factor")]
)
def test_both_generations_get_the_factor_under_their_own_name(library, generation, field):
    library(generation)
    plan = fsdp_turbo._ep_plan(["model.layers.0.mlp.experts"], "fused", 8)
    assert getattr(plan, field) == 8
    assert plan.apply_modules == plan.apply_efsdp_modules == ["model.layers.0.mlp.experts"]
    assert plan.dispatcher == "fused"
    assert [f for f in vars(plan) if f.endswith("gradient_divide_factor")] == [field]


def test_a_library_without_a_factor_is_refused(library):
    library("NONE")
    with pytest.raises(ValueError, match="no gradient_divide_factor or _gradient_divide_factor"):
        fsdp_turbo.check_upstream(params(), model(), "cpu")


@pytest.mark.parametrize("dispatcher", fsdp_turbo.DISPATCHERS)
def test_all_four_dispatchers_pass(library, dispatcher):
    library()
    assert fsdp_turbo.check_upstream(params(ep_dispatcher=dispatcher), model(), "npu") == []


def test_what_is_refused(library):
    library()
    with pytest.raises(ValueError, match="'auto' is not a dispatcher of fsdp_turbo"):
        fsdp_turbo.check_upstream(params(ep_dispatcher="auto"), model(), "npu")
    with pytest.raises(ValueError, match="wrong maths without gradients"):
        fsdp_turbo.check_upstream(params(ep_dispatcher="mc2"), model(), "cuda")
    with pytest.raises(ValueError, match="matches no module of Sequential"):
        fsdp_turbo.check_upstream(params(hook_modules=["layers.{*}"]), model(), "npu")
    assert "no effect" in fsdp_turbo.check_upstream(params(hook_modules=["{*}"]), model(), "npu")[0]


@pytest.mark.parametrize(("release", "accepted"), [((2, 8), False), ((2, 9), True), ((2, 11), True), ((2, 13), False)])
def test_custom_fsdp_is_tied_to_torch_releases(library, monkeypatch, release, accepted):
    library()
    monkeypatch.setattr(fsdp_turbo, "torch_release", lambda: release)
    asked = params(fsdp_implementation="custom")
    if accepted:
        assert "untested" in fsdp_turbo.check_upstream(asked, model(), "npu")[0]
    else:
        with pytest.raises(ValueError, match="subclasses private parts of torch"):
            fsdp_turbo.check_upstream(asked, model(), "npu")


def test_custom_fsdp_that_cannot_take_effect_is_an_error(library):
    library()
    with pytest.raises(ValueError, match="cannot take effect: the library computes experts in bf16"):
        fsdp_turbo.expert_fully_shard(
            model(), [], None, params=params(fsdp_implementation="custom"), divide_factor=2, num_local_experts=1,
            options=upstream_ranks.options(bf16=False),
        )  # fmt: skip


def test_experts_of_another_layout_are_refused(library):
    from tests.support.tiny_models import tiny_model

    library()
    gpt_oss = tiny_model("gpt_oss")
    names = [name for name, _ in gpt_oss.named_modules() if name.endswith(".experts")]
    with pytest.raises(ValueError, match="computes only SwiGLU experts"):
        fsdp_turbo.expert_parallelize(
            gpt_oss, names, None, dispatcher="eager", divide_factor=1, device=torch.device("cpu")
        )


def test_the_old_generation_has_no_domino(library, monkeypatch):
    fault = library("OLD")
    monkeypatch.delattr(torch.accelerator, "Stream", raising=False)
    whole, names = upstream_ranks.model_and_names(2)
    with pytest.raises(ValueError, match="fsdp_turbo refused expert parallelism with ep_dispatcher='domino'"):
        fsdp_turbo.expert_parallelize(
            whole, names, None, dispatcher="domino", divide_factor=1, device=torch.device("cpu")
        )
    assert fault.COMPATIBLE_ACCELERATOR_CALLS == 1
