"""The user's door: what `make demo` runs, in a few steps and from nothing, through `accelerate launch`."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ("-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_ep2.yaml")
STEPS = 4


def run(*arguments: str, timeout: int = 200) -> str:
    """Run Python in the repository root; the whole process group ends with it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{arguments} took more than {timeout} s:\n{output[-4000:]}")
    assert process.returncode == 0, output[-6000:]
    return output


def test_demo_end_to_end(tmp_path: Path):
    out = tmp_path / "demo"
    run("demo/make_inputs.py", str(out))
    recipe = yaml.safe_load((ROOT / "recipes" / "demo_sft.yaml").read_text())
    recipe |= {
        "model_name_or_path": str(out / "base_model"),
        "dataset_name": str(out / "data"),
        "output_dir": str(out / "model"),
        "max_steps": STEPS,
        "save_steps": STEPS,
        "eval_steps": STEPS,
        "logging_steps": 1,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    output = run(*LAUNCH, "recipes/sft.py", "--config", str(tmp_path / "recipe.yaml"))
    assert "ep_size=2" in output, "ep_size comes from the accelerate YAML"

    state = json.loads((out / "model" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    losses = [row["loss"] for row in state["log_history"] if "loss" in row]
    assert abs(losses[0] - math.log(2048)) < 0.2
    assert losses[-1] < losses[0]

    run(*LAUNCH, "demo/trainer_logits.py", str(out))
    report = run("demo/report.py", str(out))
    assert "all within" in report
    assert (out / "loss.png").stat().st_size > 10_000
