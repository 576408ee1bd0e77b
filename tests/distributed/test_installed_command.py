"""The wheel alone, in an empty folder: `sft` trains on two ranks, what it wrote exports, an adapter merges."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest

from tests.support.adapter_runs import plain_adapter
from tests.support.own_group import finish, run, start
from tests.support.tiny_models import save_tiny, texts

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("hf_fsdpturbo", "accelerate_configs", "recipes", "docs")
FILES = ("pyproject.toml", "setup.py", "setup.cfg", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, and the command in its ``bin``. The clone is copied, and stays as it is."""
    pytest.importorskip("setuptools", minversion="77")
    source, built, site = (tmp_path_factory.mktemp(name) for name in ("source", "built", "site"))
    for folder in BUILT_FROM:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, source)
    offline = ("--no-deps", "--no-index")
    run(source, sys.executable, *PIP, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(built), ".")
    (wheel,) = built.iterdir()
    run(source, sys.executable, *PIP, "install", *offline, "--target", str(site), str(wheel))
    return site


def test_the_wheel_holds_launch_files_recipes_and_pages(site: Path):
    models = ("recipes", "models/*/*.yaml")
    for folder, pattern in (("accelerate_configs", "*.yaml"), ("recipes", "*.*"), models, ("docs", "*.*")):
        there, found = ROOT / folder, site / "hf_fsdpturbo" / "shipped" / folder
        expected = {path.relative_to(there) for path in there.glob(pattern)}
        assert expected
        assert {path.relative_to(found) for path in found.glob(pattern)} == expected


def test_sft_export_and_merge_in_an_empty_folder(site: Path, tmp_path: Path):
    model, rows, empty = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "empty"
    save_tiny("qwen3_moe", model)
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(8)))
    empty.mkdir()
    command = str(site / "bin" / "hf-fsdpturbo")
    words = ["--model_name_or_path", str(model), "--dataset_name", str(rows), "--output_dir", "out"]
    words += ["--max_steps", "2", "--save_steps", "2", "--per_device_train_batch_size", "1", "--max_length", "32"]
    words += ["--bf16", "false", "--logging_steps", "1", "--report_to", "none"]

    output = run(empty, command, "sft", "--accelerate_config", "cpu_ep2", *words, path=site)
    assert "world_size=2, dp_size=2, cp_size=1, ep_size=2" in output
    assert "Qwen3MoeForCausalLM: " in output
    assert "this rank holds 0.00 GiB of weights (float32), then 0.00 of gradients, 0.00 of adamw_torch" in output
    assert "  experts   4 of 8 on a rank (ep 2)  0-1" in output
    assert str(site / "hf_fsdpturbo" / "shipped" / "accelerate_configs" / "cpu_ep2.yaml") in output
    assert len(re.findall(r"'loss': '[\d.]+'", output)) == 2

    assert "1 weight file(s)" in run(empty, command, "export", "out/checkpoint-2", "hub", path=site)
    plain_adapter(str(model), str(tmp_path / "adapter"))
    assert "1 weight file(s)" in run(empty, command, "merge", str(tmp_path / "adapter"), "--out", "merged", path=site)
    assert {path.name for path in empty.iterdir()} == {"out", "hub", "merged"}
    for name in ("hub", "merged"):
        assert (empty / name / "model.safetensors").stat().st_size > 10_000


def test_two_machines_and_rows_in_alpacas_format(site: Path, tmp_path: Path):
    """Two launchers that meet at an address, as `docs/multi_node.md` starts them; rows as LlamaFactory has them."""
    model, rows, empty = tmp_path / "model", tmp_path / "rows.json", tmp_path / "empty"
    save_tiny("qwen3_moe", model)
    rows.write_text(json.dumps([{"instruction": text, "input": "", "output": text[:20]} for text in texts(8)]))
    empty.mkdir()
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ["--model_name_or_path", str(model), "--dataset_name", str(rows), "--output_dir", "out"]
    words += ["--max_steps", "1", "--per_device_train_batch_size", "1", "--max_length", "64", "--bf16", "false"]
    words += ["--logging_steps", "1", "--report_to", "none", "--save_strategy", "no"]
    words += ["--chat_template_path", str(template)]
    machines = [
        start(
            empty, str(site / "bin" / "hf-fsdpturbo"), "sft", "--accelerate_config", "cpu_ep2", "--nproc", "1",
            "--nnodes", "2", "--node_rank", str(node), "--rdzv_endpoint", address, *words, path=site,
        )
        for node in range(2)
    ]  # fmt: skip
    first, second = (finish(machine) for machine in machines)
    assert "world_size=2, dp_size=2, cp_size=1, ep_size=2" in first
    assert len(re.findall(r"'loss': '[\d.]+'", first + second)) == 1
    assert (empty / "out" / "model.safetensors").stat().st_size > 10_000
