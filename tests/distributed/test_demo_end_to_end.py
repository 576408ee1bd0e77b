"""The user's door: what `make demo` runs, and the other recipes, in a few steps through `accelerate launch`."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from tests.support import own_group

ROOT = Path(__file__).parents[2]
LAUNCH = ("-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_ep2.yaml")
STEPS = 4


def run(*arguments: str) -> str:
    """Run Python in the repository root."""
    return own_group.run(ROOT, sys.executable, *arguments, path=ROOT, timeout=200)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    run("demo/make_inputs.py", str(out))
    return out


def test_demo_end_to_end(inputs: Path, tmp_path: Path):
    out = inputs
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
    assert (out / "model" / "expert_load.png").stat().st_size > 10_000
    assert f"{STEPS} windows to step {STEPS}" in run("-m", "hf_fsdpturbo", "report", str(out / "model"))


@pytest.mark.parametrize("script", ["dpo", "reward"])
def test_preference_recipes_end_to_end(script: str, inputs: Path, tmp_path: Path):
    """The right passage is preferred to the same one with its words turned round."""
    rows = [json.loads(line) for line in (inputs / "data" / "test.jsonl").read_text().splitlines()]
    with open(tmp_path / "train.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            rejected = " ".join(reversed(row["completion"].split()))
            file.write(json.dumps({"prompt": row["prompt"], "chosen": row["completion"], "rejected": rejected}) + "\n")
    arguments = ["--model_name_or_path", str(inputs / "base_model"), "--dataset_name", str(tmp_path)]
    arguments += ["--output_dir", str(tmp_path / "model"), "--max_steps", "2", "--per_device_train_batch_size", "2"]
    arguments += ["--max_length", "128", "--bf16", "false", "--logging_steps", "1", "--report_to", "none"]

    output = run(*LAUNCH, f"recipes/{script}.py", *arguments, "--save_strategy", "no")
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", output)]
    assert abs(losses[0] - math.log(2)) < 0.05, "an untrained model prefers neither"
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in names
    assert ("score.weight" in names) == (script == "reward")
