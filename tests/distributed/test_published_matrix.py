"""The five published runs at exactly their layout (16 and 8 processes), small Qwen3.5-MoE: curves equal one process.

Sizes, dispatcher and kernels come from the shipped accelerate YAMLs. All differences: CPU and gloo, float32 where the
YAMLs store bfloat16 (one float32 process is the measure), short texts. ``make matrix`` runs 100 steps, as published.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.reference_run import Run, sharded_and_reference
from tests.support.tiny_models import texts

STEPS = int(os.environ.get("MATRIX_STEPS", "6"))
CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
PREFIX = "fsdp_turbo_"
LOSS, NORM = 1e-5, 1e-3
# row -> (processes, cp_size, global batch, length) as published
ROWS = {
    "npu_ep16": (16, 1, 16, 256),
    "npu_ep16_fused": (16, 1, 16, 256),
    "npu_cp2_ep4_efsdp2": (16, 2, 8, 128),
    "npu_cp2_ep4_efsdp2_eager": (16, 2, 8, 128),
    "npu_ep8": (8, 1, 8, 256),
}
# Rows of one layout train one after the other in one set of processes.
LAYOUTS = {
    "ep16": ["npu_ep16", "npu_ep16_fused"],
    "cp2 ep4 efsdp2": ["npu_cp2_ep4_efsdp2", "npu_cp2_ep4_efsdp2_eager"],
    "ep8": ["npu_ep8"],
}


def settings(row):
    """hf_fsdpturbo fields of a shipped YAML, in float32."""
    shipped = yaml.safe_load((CONFIGS / f"{row}.yaml").read_text())
    world, cp_size, _, _ = ROWS[row]
    assert shipped["num_processes"] == world
    turbo = {name.removeprefix(PREFIX): value for name, value in shipped["fsdp_config"].items()}
    assert turbo.get("cp_size", 1) == cp_size
    turbo["dist_config"] = {**turbo.get("dist_config", {}), "param_storage_dtype": "float32"}
    return turbo


def run_of(row, path):
    world, cp_size, batch, length = ROWS[row]
    per_device = batch * cp_size // world
    args = {
        "max_steps": STEPS,
        "per_device_train_batch_size": per_device,
        "learning_rate": 1e-4,
        "max_grad_norm": 1.0,
    }
    data = {"text": texts(batch * 10, seed=5)}
    run = Run(path, data, args={**args, "max_length": length}, turbo=settings(row), gradients=False)
    return replace(run, model_kwargs={"attn_implementation": "sdpa"})


def curve_distance(mine, theirs):
    mine, theirs = torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    assert mine.shape == theirs.shape == (STEPS,)
    return float(((mine - theirs).abs() / theirs.abs()).max())


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_curves_equal_one_process(tiny, layout):
    path = tiny("qwen3_5_moe", layers=4, num_experts=16)
    runs = {row: run_of(row, path) for row in LAYOUTS[layout]}
    world, cp_size, _, _ = ROWS[LAYOUTS[layout][0]]
    results = sharded_and_reference(runs, world, cp_size=cp_size, timeout=60 + 12 * STEPS)
    for row, (record, reference, _) in results.items():
        loss = curve_distance(record.losses, reference.losses)
        norm = curve_distance(record.grad_norms, reference.grad_norms)
        ends = f"{record.losses[0]:.4f} -> {record.losses[-1]:.4f}"
        print(f"{row}: loss {ends}, off by {loss:.1e}; gradient norm off by {norm:.1e}")
        assert loss < LOSS, row
        assert norm < NORM, row
        assert 5 < record.losses[0] < 7  # ln 384 = 5.95
        assert record.losses[-1] < record.losses[0]
        assert len(record.extra["ranks"]) == world


def test_every_published_row_is_here():
    assert set(ROWS) == {name for names in LAYOUTS.values() for name in names}
    assert set(ROWS) == {path.stem for path in CONFIGS.glob("npu_*.yaml")}
