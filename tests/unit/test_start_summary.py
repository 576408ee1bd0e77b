"""The start-up summary: numbers of parameters and bytes, the layout drawn, plan's peak beside the measured one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl

from hf_fsdpturbo.topology import Topology
from hf_fsdpturbo.trainer import planned_peak
from hf_fsdpturbo.trainer.layout_drawing import drawn
from hf_fsdpturbo.trainer.planned_peak import PlannedPeak
from hf_fsdpturbo.trainer.start_summary import start_lines
from tests.support.tiny_models import tiny_model

DRAWN = {
    (16, 8, None, 1, 1): [
        "  experts   16 of 128 on a rank (ep 8)  0-7 | 8-15",
        "  an expert cut in 2 (efsdp 2)          0 8 | 1 9 | 2 10 | ...",
        "  a sample  whole on a rank",
        "  all else  cut in 16 (FSDP)            0-15",
    ],
    (16, 4, 1, 2, 2): [
        "  experts   32 of 128 on a rank (ep 4)                 0 2 4 .. 6 | 1 3 5 .. 7 | 8 10 12 .. 14 | ...",
        "  an expert cut in 2 (efsdp 1 x cp 2), 2 copies (edp)  0-1 | 2-3 | 4-5 | ...",
        "  a sample  cut in 2 (cp), 8 batches                   0-1 | 2-3 | 4-5 | ...",
        "  all else  cut in 8 (FSDP), 2 copies (HSDP)           0-7 | 8-15",
    ],
}


@pytest.mark.parametrize("sizes", DRAWN)
def test_a_layout_in_four_lines(sizes: tuple[Any, ...]):
    world, ep, efsdp, cp, replicas = sizes
    topology = Topology.resolve(world, ep_size=ep, efsdp_size=efsdp, cp_size=cp, mp_replicate_size=replicas)
    assert drawn(topology, 128) == DRAWN[sizes]


def test_groups_are_those_of_the_meshes():
    """Against the meshes that a run builds: same order of axes."""
    sizes = Topology.resolve(16, ep_size=2, efsdp_size=2, cp_size=2)
    mesh = torch.arange(16).reshape(sizes.expert_shape)
    lines = drawn(sizes, 8)
    assert " ".join(map(str, mesh[0, 0, :, 0].tolist())) == "0 2"
    assert "0 2 | 1 3 | 4 6" in lines[0]
    assert mesh[0, :, 0].flatten().tolist() == [0, 1, 4, 5]
    assert "0 1 4 .. 5 | 2 3 6 .. 7" in lines[1]
    assert drawn(Topology.resolve(4), 0)[0].split() == ["experts", "none:", "a", "dense", "model"]


def arguments(**changed: Any) -> Any:
    fields = {
        "optim": "adamw_torch_fused", "bf16": True, "device": torch.device("cuda"), "max_length": 4096,
        "recompute": "full", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
        "gradient_checkpointing": True,
        "fsdpturbo_params": SimpleNamespace(offload_params=False),
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changed})


def report(**changed: Any) -> Any:
    fields = {"fused_alone": 0, "dispatcher": "auto", "notes": [], "kernels": None, "num_experts": 8}
    return SimpleNamespace(**{**fields, **changed})


def test_parameters_and_bytes():
    model = tiny_model("qwen3_moe", dtype="bfloat16")
    model.lm_head.requires_grad_(False)
    total = sum(parameter.numel() for parameter in model.parameters())
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    first, second = start_lines(model, arguments(), Topology.resolve(1), None)
    assert f"Qwen3MoeForCausalLM: {total} parameters: {routed} in experts, {total - routed} dense" in first
    assert f"{total - model.lm_head.weight.numel()} are trained" in first
    assert "(bfloat16), then 0.00 of gradients, 0.00 of adamw_torch_fused; it computes in bfloat16" in second
    assert len(start_lines(model, arguments(), Topology.resolve(4, ep_size=2), report())) == 6


def test_plans_peak_and_the_measured_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    model = tiny_model("qwen3_moe", dtype="bfloat16")
    sizes = Topology.resolve(4, ep_size=2)
    peak = PlannedPeak(trl.SFTTrainer, arguments(), sizes)
    line = peak.line(model, report())
    assert line is not None
    assert "2 x 4096 tokens" in line
    assert peak.gib is not None
    monkeypatch.setattr(planned_peak, "memory_bytes", lambda device: (int(1.5 * peak.gib * 2**30), 0))
    peak.say_measured()
    said = capsys.readouterr().out
    assert f"measured peak: {1.5 * peak.gib:.1f} GiB on the fullest rank, planned {peak.gib:.1f} (+50%)" in said
    on_cpu = PlannedPeak(trl.SFTTrainer, arguments(device=torch.device("cpu")), sizes)
    assert on_cpu.line(model, report()) is None
    on_cpu.say_measured()
    assert capsys.readouterr().out == ""


QUIET = {
    "any length": (trl.SFTTrainer, {"max_length": None}),
    "float32": (trl.SFTTrainer, {"bf16": False}),
    "a loss of its own": (object, {}),
}


@pytest.mark.parametrize("case", QUIET)
def test_no_peak_where_plan_knows_no_such_run(case: str):
    trainer, changed = QUIET[case]
    peak = PlannedPeak(trainer, arguments(**changed), Topology.resolve(4, ep_size=2))
    assert peak.line(tiny_model("qwen3_moe", dtype="bfloat16"), report()) is None


def test_settings_reach_the_plan():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny_model("qwen3_moe", dtype="bfloat16"),
        LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]),
    )
    found = report(notes=["LM head: gradients in its forward"], kernels=SimpleNamespace(lines=["liger: rms_norm"]))
    args = arguments(fsdpturbo_params=SimpleNamespace(offload_params=True), gradient_checkpointing=False)
    run = PlannedPeak(trl.DPOTrainer, args, Topology.resolve(8, ep_size=2, cp_size=2))._run(model, found)
    assert run is not None
    assert (run.task, run.recompute, run.dispatcher, run.storage) == ("dpo", "off", "fused", "bfloat16")
    assert (run.fused_head, run.liger, run.offload, run.lora_r, run.lora_targets) == (True, True, True, 4, "all")
