"""What a release has and the class does not use (``mtp.*``, a layer too many) reaches every export, bit for bit."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_fsdpturbo.checkpoint import unused
from hf_fsdpturbo.export import export_checkpoint
from tests.support.reference_run import Run, build_trainer
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import save_tiny, texts
from tests.support.written import tensors_of

EXTRA = {
    "qwen3_moe": {
        "mtp.fc.weight": torch.randn(32, 64),
        "mtp.layers.0.mlp.experts.0.gate_proj.weight": torch.randn(16, 32).bfloat16(),
        "mtp.layers.0.mlp.experts.0.gate_proj.weight_scale_inv": torch.rand(()),
    },
    "deepseek_v3": {
        "model.layers.2.eh_proj.weight": torch.randn(32, 64),
        "model.layers.2.mlp.experts.7.down_proj.weight": torch.randn(32, 16).to(torch.float8_e4m3fn),
    },
}
CLAIM = {"qwen3_moe": "mtp_num_hidden_layers", "deepseek_v3": "num_nextn_predict_layers"}


def release(family: str, folder: Path) -> str:
    """A tiny model with more in its file than its class uses, and a config that says so."""
    path = save_tiny(family, folder)
    weights = Path(path) / "model.safetensors"
    save_file({**load_file(weights), **EXTRA[family]}, weights, {"format": "pt"})
    config = json.loads((Path(path) / "config.json").read_text())
    (Path(path) / "config.json").write_text(json.dumps({**config, CLAIM[family]: 1}))
    return path


def check_carried(family: str, source: str, directory: str | Path) -> None:
    """All names of the release, the unused ones with its bits; the config claims them."""
    want, got = tensors_of(source), tensors_of(directory)
    assert sorted(got) == sorted(want)
    for name, tensor in EXTRA[family].items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (got[name], tensor))), name
    assert json.loads((Path(directory) / "config.json").read_text())[CLAIM[family]] == 1


def train_save_resume(source: str, folder: str, more: dict) -> str:
    """Rank function: three steps with checkpoints, ``save_model``; then the run is resumed. What it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        _train_save_resume(source, folder, more)
    return said.getvalue()


def _train_save_resume(source: str, folder: str, more: dict) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    args = {"output_dir": f"{folder}/run", "max_steps": 3, **saving}
    trainer = build_trainer(Run(source, {"text": texts(24)}, args, more, gradients=False), turbo=True)
    trainer.hub_file_bytes = 20_000
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    if trainer.args.process_index == 0:
        shutil.rmtree(f"{source}-moved", ignore_errors=True)
        shutil.copytree(source, f"{source}-moved")
        os.remove(f"{source}/model.safetensors")  # the release is gone: the newest checkpoint has its tensors
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(f"{folder}/later")
    args["max_steps"] = 4
    again = build_trainer(Run(f"{source}-moved", {"text": texts(24)}, args, more, gradients=False), turbo=True)
    again.train(resume_from_checkpoint=f"{folder}/run/checkpoint-3")
    again.save_model(f"{folder}/resumed")


@pytest.mark.parametrize("family", EXTRA)
def test_carried_through_training_checkpoints_and_resume(family, tmp_path):
    """S9."""
    source = release(family, tmp_path / "source")
    said = run_ranks(train_save_resume, 2, source, str(tmp_path), {"ep_size": 2}, timeout=100)
    listed = [line for text in said for line in text.splitlines() if "are not used by" in line]
    assert len(listed) == 1, "once, on one rank, though two trainers loaded it"
    assert f"{len(EXTRA[family])} tensors" in listed[0]
    assert {"qwen3_moe": "mtp.layers.0.* (2)", "deepseek_v3": "model.layers.2.* (2)"}[family] in listed[0]
    moved = f"{source}-moved"
    for name in ("saved", "later", "resumed"):
        check_carried(family, moved, tmp_path / name)
    assert (tmp_path / "saved" / "model.safetensors.index.json").is_file()
    assert (tmp_path / "resumed" / "model.safetensors").is_file()
    files = [tmp_path / "run" / f"checkpoint-{n}" / unused.UNUSED_FILE for n in (3, 4)]
    assert all(sorted(load_file(file)) == sorted(EXTRA[family]) for file in files)
    elsewhere = tmp_path / "other machine"
    shutil.copytree(tmp_path / "run" / "checkpoint-4", elsewhere)
    shutil.rmtree(moved)
    export_checkpoint(str(elsewhere), str(tmp_path / "exported"), 10**9)
    check_carried(family, str(tmp_path / "resumed"), tmp_path / "exported")
    assert not (tmp_path / "exported" / unused.UNUSED_FILE).exists()


def save_hub_checkpoint(cases: list[tuple[str, str, dict, dict]]) -> None:
    """Rank function: one step with Hub weights in ``checkpoint-1``, and ``save_model``."""
    for source, folder, args, turbo in cases:
        args = {"output_dir": folder, "max_steps": 1, "save_strategy": "steps", "save_steps": 1, **args}
        trainer = build_trainer(Run(source, {"text": texts(8)}, args, turbo, gradients=False), turbo=True)
        trainer.train()
        trainer.save_model(f"{folder}/saved")


def test_hub_weights_in_checkpoints_rank0_loading_and_dropping(tmp_path):
    sources = {family: release(family, tmp_path / family) for family in EXTRA}
    cases = [
        (sources["qwen3_moe"], "meta", {"save_only_model": True}, {"ep_size": 2}),
        (sources["qwen3_moe"], "rank0", {}, {"ep_size": 2, "init_config": {"name": "init_on_rank0"}}),
        (sources["deepseek_v3"], "whole", {}, {"ep_size": 2, "init_config": {"name": "init_on_default"}}),
        (sources["qwen3_moe"], "dropped", {}, {"ep_size": 2, "drop_unused_tensors": True}),
        (sources["deepseek_v3"], "dropped too", {}, {"ep_size": 2, "drop_unused_tensors": True}),
    ]
    run_ranks(save_hub_checkpoint, 2, [(s, str(tmp_path / n), a, t) for s, n, a, t in cases], timeout=120)
    check_carried("qwen3_moe", sources["qwen3_moe"], tmp_path / "meta" / "checkpoint-1")
    for name, family in (("meta", "qwen3_moe"), ("rank0", "qwen3_moe"), ("whole", "deepseek_v3")):
        check_carried(family, sources[family], tmp_path / name / "saved")
    for name, family in (("dropped", "qwen3_moe"), ("dropped too", "deepseek_v3")):
        saved = tmp_path / name / "saved"
        assert sorted(tensors_of(saved)) == sorted(tensors_of(sources[family]).keys() - EXTRA[family].keys())
        config = json.loads((saved / "config.json").read_text())
        assert not [field for field in unused.CLAIMS if config.get(field)]
        assert not (tmp_path / name / "checkpoint-1" / unused.UNUSED_FILE).exists()


def save_alone(source: str, folder: str) -> None:
    """For a plain process: one step of our trainer in one process."""
    save_hub_checkpoint([(source, folder, {}, {})])


def test_one_process(tmp_path):
    source = release("deepseek_v3", tmp_path / "source")
    run_plain(save_alone, source, str(tmp_path / "run"))
    check_carried("deepseek_v3", source, tmp_path / "run" / "saved")
    check_carried("deepseek_v3", source, tmp_path / "run" / "checkpoint-1")  # plain Trainer's files: Hub weights


def save_merged(source: str, folder: str) -> None:
    """Rank function: a LoRA run; its checkpoint holds no base weights, the merged export carries."""
    from peft import LoraConfig

    args = {"output_dir": folder, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    adapter = {"peft_config": LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")}
    run = Run(source, {"text": texts(8)}, args, {"ep_size": 2}, gradients=False, trainer_kwargs=adapter)
    trainer = build_trainer(run, turbo=True)
    trainer.train()
    trainer.save_merged_model(f"{folder}/merged")


def test_merged_adapter(tmp_path):
    source = release("qwen3_moe", tmp_path / "source")
    run_ranks(save_merged, 2, source, str(tmp_path / "run"), timeout=90)
    check_carried("qwen3_moe", source, tmp_path / "run" / "merged")
    assert not (tmp_path / "run" / "checkpoint-1" / unused.UNUSED_FILE).exists()
