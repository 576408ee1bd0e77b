"""What check_model says about a model that fits: notes for the summary."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hf_fsdpturbo.arguments import FSDPTurboParams
from hf_fsdpturbo.parallelize import order
from tests.support.tiny_models import tiny_config


def test_notes_of_the_upstream_check_are_kept(monkeypatch):
    """Such as that hook_modules has no effect with fsdp_implementation='native'."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    monkeypatch.setattr(order.fsdp_turbo, "check_upstream", lambda params, model, device_type: ["no effect"])
    topology = SimpleNamespace(cp_size=1, ep_size=2, expert_shard_size=1)
    state = SimpleNamespace(topology=topology, device_type="cpu")
    args = SimpleNamespace(bf16=False, fsdpturbo_params=FSDPTurboParams(ep_backend="fsdp_turbo"))
    counts, notes = order.check_model(model, args, state)
    assert set(counts.values()) == {8}
    assert notes == ["no effect"]
