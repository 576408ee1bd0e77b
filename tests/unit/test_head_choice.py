"""Whose fused LM head runs: ours only where the loss weighs all positions alike; ``on`` that cannot be is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from trl import SFTTrainer

import hf_fsdpturbo
from hf_fsdpturbo.sharding.outer_fsdp import head_alone
from hf_fsdpturbo.trainer.head_choice import HeadChoice
from tests.support.tiny_models import tiny_model

ARGS: dict[str, Any] = {
    "fused_linear_cross_entropy": "on",
    "loss_type": "nll",
    "label_smoothing_factor": 0.0,
    "torch_compile": False,
    "device": torch.device("cuda"),
}


class Weighted(hf_fsdpturbo.FSDPTurboSFTTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


class Logged(hf_fsdpturbo.FSDPTurboSFTTrainer):
    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **kwargs)


class Mixed(hf_fsdpturbo.FSDPTurboTrainerMixin, SFTTrainer):
    pass


def choice(trainer: type = hf_fsdpturbo.FSDPTurboSFTTrainer, given: Any = None, **args: Any) -> HeadChoice:
    values = {"args": SimpleNamespace(**{**ARGS, **args}), **(given or {})}
    return HeadChoice(trainer, SimpleNamespace(get=values.get), values["args"])  # type: ignore[arg-type]


KEPT = {
    "dft": ({"loss_type": "dft"}, "loss_type='dft'"),
    "smoothed": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
    "compiled": ({"torch_compile": True}, "torch_compile"),
    "loss": ({"given": {"compute_loss_func": len}}, "compute_loss_func"),
    "overridden": ({"trainer": Weighted}, "Weighted.compute_loss"),
    "dpo": ({"trainer": hf_fsdpturbo.FSDPTurboDPOTrainer}, "SFTTrainer"),
}


@pytest.mark.parametrize("trainer", [hf_fsdpturbo.FSDPTurboSFTTrainer, Logged, Mixed])
@pytest.mark.parametrize("asked", ["on", "auto"])
def test_ours_runs_in_sft(trainer: type, asked: str):
    assert choice(trainer, fused_linear_cross_entropy=asked).is_ours


@pytest.mark.parametrize("case", KEPT)
def test_what_weighs_positions_otherwise_keeps_trls(case: str):
    kwargs, named = KEPT[case]
    kept = choice(**kwargs, fused_linear_cross_entropy="auto")
    assert not kept.is_ours
    if case != "dpo":
        assert named in (kept.install(None) or "")
    with pytest.raises(ValueError, match="fused_linear_cross_entropy='on' cannot be") as error:
        choice(**kwargs)
    assert named in str(error.value)


def test_auto_is_plain_on_cpu_and_off_everywhere():
    for args in (
        {"fused_linear_cross_entropy": "auto", "device": torch.device("cpu")},
        {"fused_linear_cross_entropy": "off"},
    ):
        plain = choice(**args)
        assert not plain.is_ours
        assert plain.install(None) is None
    assert choice(device=torch.device("cpu")).is_ours


def test_a_head_that_was_counted_on_and_is_not_there_is_an_error():
    """Its weight may be in a unit that nobody else may read."""
    trainer = SimpleNamespace(model=tiny_model("qwen3_moe"))
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM has no fused LM head"):
        choice(fused_linear_cross_entropy="auto").install(trainer)


def test_which_head_can_be_a_unit():
    model = tiny_model("qwen3_moe")
    assert head_alone(model) is model.lm_head
    assert head_alone(tiny_model("qwen3_moe", tie=True)) is None
    model.lm_head = nn.Sequential(model.lm_head)
    assert head_alone(model) is None
