"""LlamaFactory's YAMLs, in both of its layouts, become a recipe that our parser takes and a launch file."""

import json

import pytest
import yaml

from hf_fsdpturbo.cli import main
from hf_fsdpturbo.commands import llamafactory
from hf_fsdpturbo.launch_config.accelerate_yaml import read_plain

PLUGIN = """
model: some/Qwen3-MoE
model_class: llm
template: qwen3_nothink
kernel_config: {name: auto, include_kernels: auto}
dist_config:
  name: fsdpturbo
  cp_size: 2
  ep_size: 4
  ep_dispatcher: fused
  param_dtype: bf16
  ep_modules: ["model.layers.{*}.mlp.experts"]
init_config: {name: init_on_meta}
train_dataset: sets.yaml
output_dir: out
micro_batch_size: 2
global_batch_size: 16
cutoff_len: 256
learning_rate: 1.0e-4
max_steps: 5
"""
CLASSIC = """
model_name_or_path: some/Qwen3-MoE
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: first, second
dataset_dir: data
max_samples: 100
template: qwen3
cutoff_len: 128
packing: false
output_dir: out
per_device_train_batch_size: 1
learning_rate: 1.0e-5
lr_scheduler_type: cosine
warmup_ratio: 0.1
disable_gradient_checkpointing: true
flash_attn: sdpa
resume_from_checkpoint: null
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sets.yaml").write_text("one: {file_name: a.json, converter: alpaca, num_samples: 5}\n")
    (tmp_path / "data").mkdir()
    info = {"first": {"file_name": "a.json"}, "second": {"file_name": "b.jsonl", "formatting": "sharegpt"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path


def converted(folder, text, *words):
    (folder / "run.yaml").write_text(text)
    assert main(["convert", str(folder / "run.yaml"), "--out", str(folder / "out"), *words]) == 0
    recipe, launch = (folder / "out" / f"run_{kind}.yaml" for kind in ("recipe", "accelerate"))
    return recipe, yaml.safe_load(recipe.read_text()), read_plain(launch)


def parsed(recipe):
    from hf_fsdpturbo.commands.recipe import parse
    from hf_fsdpturbo.commands.sft import make_parser

    return parse(make_parser(), ["--config", str(recipe), "--use_cpu", "true"])


def test_the_plugins_layout(folder, capsys):
    recipe, found, launch = converted(folder, PLUGIN)
    assert launch["num_processes"] == 8  # ep 4 x cp 2
    dist = {"ep_size": 4, "ep_dispatcher": "fused"}
    assert launch["fsdp_config"] == {"fsdp_turbo_cp_size": 2, "fsdp_turbo_dist_config": dist}
    assert found["gradient_accumulation_steps"] == 16 // (2 * 4)
    files = {"path": "json", "data_files": str(folder / "a.json"), "split": "train[:5]"}
    assert found["datasets"] == [files]
    assert found["kernel_config"] == {"name": "auto"}
    said = capsys.readouterr().out
    for key in ("template", "dist_config.param_dtype", "dist_config.ep_modules", "kernel_config.include_kernels"):
        assert f"{key}: " in said
    assert "hf-fsdpturbo sft --accelerate_config" in said
    _, training, model, mixture = parsed(recipe)
    assert (training.max_length, training.per_device_train_batch_size, training.max_steps) == (256, 2, 5)
    assert model.model_name_or_path == "some/Qwen3-MoE"
    assert mixture.datasets[0].data_files == str(folder / "a.json")


def test_the_older_layout(folder):
    recipe, found, launch = converted(folder, CLASSIC, "--devices", "2", "--device", "cpu")
    assert launch["num_processes"] == 2
    assert launch["use_cpu"] is True
    assert [entry["split"] for entry in found["datasets"]] == ["train[:100]"] * 2
    _, training, model, _ = parsed(recipe)
    assert (model.use_peft, model.lora_r, model.lora_target_modules) == (True, 8, "all-linear")
    assert training.warmup_steps == 0.1
    assert training.gradient_checkpointing is False
    assert model.attn_implementation == "sdpa"


@pytest.mark.parametrize(("text", "words"), [
    ("output_dir: out", ["names no model"]),
    ("model: m\nep_sise: 2", ["ep_sise=2", "not known"]),
    ("model: m\nstage: ppo", ["stage='ppo'", "sft, dpo, rm"]),
    ("model: m\nfinetuning_type: freeze", ["freeze", "LoRA"]),
    ("model: m\nquantization_bit: 8", ["quantization_bit=8", "4 bits"]),
    ("model: m\ndataset: other", ["'other'", "dataset_info.json"]),
    ("model: m\nmicro_batch_size: 3\nglobal_batch_size: 16", ["global_batch_size=16", "multiple of 3"]),
    ("- a list", ["mapping"]),
    ("model: m\nstage: [sft]", ["stage=['sft']"]),
    ("model: m\nflash_attn: [fa2]", ["flash_attn=['fa2']"]),
    ("model: m\nfinetuning_type: {lora: 1}", ["finetuning_type="]),
    ("model: m\nmicro_batch_size: 0\nglobal_batch_size: 16", ["micro_batch_size", "0"]),
    ("model: m\ndist_config: {cp_size: [2]}", ["cp_size", "[2]"]),
    ("model: m\ndist_config: {ep_size: [8, 4]}", ["ep_size", "[8, 4]"]),
    ("model: m\ndp_size: -8", ["dp_size", "-8"]),
    ("model: m\nkernel_config: {name: turbo}", ["kernel_config", "turbo"]),
    ("model: m\ndataset: first\nmax_samples: -3", ["max_samples", "-3"]),
    ("model: m\ntrain_dataset: rows.jsonl", ["train_dataset='rows.jsonl'", "file_name"]),
    ("model: m\nmodel: n", ["model"]),
])  # fmt: skip
def test_bad_input_is_one_line(folder, capsys, text, words):
    (folder / "run.yaml").write_text(text)
    with pytest.raises(SystemExit) as left:
        main(["convert", str(folder / "run.yaml"), "--out", str(folder / "out")])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "argument FILE" in said
    for word in words:
        assert word in said
    assert not (folder / "out").exists()


def test_nothing_is_written_over(folder, capsys):
    converted(folder, PLUGIN)
    with pytest.raises(SystemExit):
        main(["convert", str(folder / "run.yaml"), "--out", str(folder / "out")])
    assert "exists" in capsys.readouterr().err


def test_every_key_has_one_meaning():
    tables = [set(llamafactory.SAME), set(llamafactory.TOPOLOGY), set(llamafactory.LEFT_OUT)]
    tables.append(set(llamafactory._SPECIAL))
    both = {key for i, one in enumerate(tables) for other in tables[i + 1 :] for key in one & other}
    assert both == {"use_v1_kernels"} & both
