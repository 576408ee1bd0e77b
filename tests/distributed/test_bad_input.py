"""Bad input: one clear ValueError on every rank, and no rank waits for another (two ranks, through the trainer)."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import replace
from typing import Any

import pytest

from tests.support.reference_run import DEFAULT_ARGS
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import texts

# What is tried on both ranks: name -> (training arguments, model, parts the message must have).
# Arguments are fields of FSDPTurboSFTConfig; the model is a key of `models` below.
EP2 = {"ep_size": 2}
CASES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "unknown_key": ({"dist_config": {"ep_siez": 2}}, "moe", ("Unknown params", "ep_siez", "ep_size")),
    "misplaced_key": ({"dist_config": {"cp_size": 2}}, "moe", ("Unknown params", "cp_size", "--cp_size")),
    "ep_modules": ({"dist_config": {"ep_modules": ["x"]}}, "moe", ("Unknown params", "ep_modules", "register")),
    "contradiction": ({"ep_size": 2, "dist_config": {"ep_size": 1}}, "moe", ("ep_size=2", "ep_size=1", "contradicts")),
    "ep_not_dividing_dp": ({"ep_size": 3}, "moe", ("ep_size (3) must divide dp_size (2)",)),
    "ep_zero": ({"ep_size": 0}, "moe", ("ep_size", "positive", "0")),
    "efsdp_not_dividing": ({"dist_config": {"efsdp_size": 3}}, "moe", ("efsdp_size (3) must divide",)),
    "dp_size": ({"dp_size": 3}, "moe", ("dp_size (3)", "world_size (2)")),
    "cp_not_dividing": ({"cp_size": 3}, "moe", ("cp_size",)),
    "cp_mode": ({"cp_mode": "ring"}, "moe", ("cp_mode", "ulysses", "ring")),
    "mp_replicate": ({"mp_replicate_size": 3}, "moe", ("mp_replicate_size (3) must divide world_size (2)",)),
    "experts_not_dividing": (EP2, "three_experts", ("ep_size (2)", "experts (3)", "model.layers.0.mlp.experts")),
    "unregistered_model": (EP2, "dense", ("No FSDPTurbo EP spec is registered for model_type='llama'", "register")),
    "unknown_ignored_module": (
        {**EP2, "dist_config": {"fsdp_ignored_modules": ["model.layers.{*}.nose"]}},
        "moe",
        ("fsdp_ignored_modules", "model.layers.{*}.nose"),
    ),
    "mc2_elsewhere": ({**EP2, "ep_dispatcher": "mc2"}, "moe", ("mc2",)),
    "unknown_dispatcher": ({**EP2, "ep_dispatcher": "telepathy"}, "moe", ("ep_dispatcher", "telepathy", "eager")),
    "upstream_missing": ({**EP2, "dist_config": {"ep_backend": "fsdp_turbo"}}, "moe", ("requirements/fsdpturbo.txt",)),
    "hook_modules_native": ({**EP2, "dist_config": {"hook_modules": ["a"]}}, "moe", ("hook_modules", "ep_backend")),
    "fp16": ({**EP2, "fp16": True}, "moe", ("fp16",)),
    "torch_compile": ({**EP2, "torch_compile": True}, "moe", ("torch_compile",)),
    "auto_find_batch_size": ({**EP2, "auto_find_batch_size": True}, "moe", ("auto_find_batch_size",)),
    "deepspeed": ({**EP2, "deepspeed": {"zero_optimization": {"stage": 2}}}, "moe", ("deepspeed",)),
    "fsdp": ({**EP2, "fsdp": "full_shard"}, "moe", ("fsdp",)),
    "offload_of_wrong_type": ({**EP2, "dist_config": {"offload_params": "yes"}}, "moe", ("offload_params", "bool")),
    "optimizer_4bit": ({**EP2, "optim": "adamw_torch_4bit"}, "moe", ("optim", "4bit")),
    "optimizer_8bit": ({**EP2, "optim": "adamw_8bit"}, "moe", ("optim", "8bit")),
    "device_map": ({**EP2, "model_init_kwargs": {"device_map": "auto"}}, "moe", ("device_map",)),
    "own_distributed_config": (
        {**EP2, "model_init_kwargs": {"distributed_config": {"ep_size": 2}}},
        "moe",
        ("distributed_config",),
    ),
    "quantised": (EP2, "quantised", ("quantised", "quant_method=", "Use its unquantised version")),
    "packed_without_scales": (
        EP2,
        "packed_without_scales",
        ("model.safetensors", "experts.2.up_proj.weight has dtype F8_E4M3", "no scales"),
    ),
    "packed_otherwise": (
        {**EP2, "model_init_kwargs": {"quantization_config": {"quant_method": "mxfp4", "dequantize": True}}},
        "moe",
        ("Mxfp4Config(dequantize=True), but", "is not quantised"),
    ),
    "truncated_shard": (EP2, "truncated", ("model.safetensors", "truncated")),
    "missing_shard": (EP2, "missing_shard", ("is missing", "-00002-of-")),
    "no_model_there": (EP2, "nowhere", ("nowhere",)),
    "moved_expert": (EP2, "moved_expert", ("model.safetensors", "layers.1.mlp.experts.9.up_proj", "numbered 0 to 7")),
    "file_outside": (EP2, "file_outside", ("model.safetensors.index.json", "'../elsewhere.safetensors'")),
    "linked_shard": (EP2, "linked_shard", ("-00002-of-", "is a link to", "outside its folder")),
    "endless_layers": (EP2, "endless_layers", ("config.json", "num_hidden_layers=1000000000", "tensors in all")),
    "eps_nan": (EP2, "eps_nan", ("rms_norm_eps is NaN",)),
    "nine_of_eight": (EP2, "nine_of_eight", ("num_experts_per_tok=9", "number of experts, 8")),
    "integer_weights": (EP2, "integer_weights", ("model.norm.weight has dtype I8", "quantization_config")),
    "output_dir_a_file": ({**EP2, "output_dir": __file__}, "moe", ("output_dir=", "cannot be made")),
    "output_dir_long": ({**EP2, "output_dir": "/tmp/" + "x" * 300}, "moe", ("output_dir=", "too long")),
    "output_dir_empty": ({**EP2, "output_dir": ""}, "moe", ("output_dir", "an empty path")),
    "output_dir_surrogate": ({**EP2, "output_dir": "/tmp/a\ud800"}, "moe", ("output_dir", "lone surrogate")),
    "endless_timeout": ({**EP2, "dist_timeout": 10**30}, "moe", ("dist_timeout must be more than 0 and at most",)),
}
ROWS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no_rows": ({"text": []}, ("train_dataset has no rows",)),
    "null_text": ({"text": ["a long enough text", None]}, ("train_dataset: row 1 has no 'text'",)),
    "number_text": ({"text": [1, 2, 3]}, ("column 'text' holds int64",)),
    "mapping_text": ({"text": [{"a": 1}] * 3}, ("column 'text' holds mappings of ['a']",)),
    "no_text": ({"words": ["a", "b"]}, ("text",)),
}


def try_all(models: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Rank function: exception class and message of every case."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

    from hf_fsdpturbo import FSDPTurboSFTConfig, FSDPTurboSFTTrainer, parallel_state
    from tests.support.reference_run import forget_accelerate

    result = {}
    data = Dataset.from_dict({"text": texts(4)})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models["moe"])
    for name, (fields, model, _) in CASES.items():
        forget_accelerate()
        parallel_state._STATE = None
        try:
            fields = {**DEFAULT_ARGS, "output_dir": tempfile.mkdtemp(), **fields}
            args = FSDPTurboSFTConfig(**fields)
            FSDPTurboSFTTrainer(models[model], args=args, train_dataset=data, processing_class=tokenizer)
            result[name] = ("", "no error")
        except Exception as error:  # noqa: BLE001  (the test says which class it has to be)
            result[name] = (type(error).__name__, str(error))
    # Nobody hangs, and the ranks are still in step: a real trainer is built last.
    forget_accelerate()
    parallel_state._STATE = None
    args = FSDPTurboSFTConfig(**{**DEFAULT_ARGS, "output_dir": tempfile.mkdtemp(), **EP2})
    trainer = FSDPTurboSFTTrainer(models["moe"], args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    result.update(refused_rows(trainer, tokenizer), **refused_by_trainers(trainer, data, tokenizer))
    return {**result, **under_a_file_limit(trainer, models["rows"], tokenizer)}


SMALL_FILES = {  # name -> (ranks whose files may not be longer than 1 KB, what writes, words that a rank must say)
    "mapping_on_rank_0": ((0,), "rows", ("preparing the data set failed on rank 0 of 2", "File too large")),
    "mapping_on_all": ((0, 1), "rows", ("preparing the data set failed on rank 0 of 2", "File too large")),
    "printing_on_rank_0": ((0,), "print", ("printing the summary failed on rank 0 of 2", "File too large")),
    "none": ((), "print", ()),
}


def under_a_file_limit(trainer: Any, rows: str, tokenizer: Any) -> dict[str, tuple[str, str]]:
    """Set-up where no file may be longer than 1 KB (RLIMIT_FSIZE): TRL's map writes one, and so does a print."""
    import resource

    from datasets import load_from_disk

    result, before = {}, resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, (ranks, writer, _) in SMALL_FILES.items():
        data = load_from_disk(rows, keep_in_memory=writer == "print")
        with tempfile.TemporaryFile("w", buffering=1) as out, contextlib.redirect_stdout(out):
            if writer == "print":
                out.write("what was printed before\n" * 50)  # more than 1 KB
            if trainer.args.process_index in ranks:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
            try:
                type(trainer)(
                    trainer.model.name_or_path, args=trainer.args, train_dataset=data, processing_class=tokenizer
                )
                result[name] = ("", "no error")
            except Exception as error:  # noqa: BLE001  (the test says which class it has to be)
                result[name] = (type(error).__name__, str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return result


def refused_rows(trainer: Any, tokenizer: Any) -> dict[str, tuple[str, str]]:
    """Data sets that cannot train; TRL prepares them on rank 0 while the others wait for it."""
    from datasets import Dataset

    result = {}
    for name, (columns, _) in ROWS.items():
        try:
            type(trainer)(
                trainer.model.name_or_path,
                args=trainer.args,
                train_dataset=Dataset.from_dict(columns),
                processing_class=tokenizer,
            )
            result[name] = ("", "no error")
        except Exception as error:  # noqa: BLE001  (the test says which class it has to be)
            result[name] = (type(error).__name__, str(error))
    return result


def refused_by_trainers(trainer: Any, data: Any, tokenizer: Any) -> dict[str, tuple[str, str]]:
    """What comes in as an argument of the trainer, or is asked of it."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

    from hf_fsdpturbo import FSDPTurboSFTTrainer, FSDPTurboTrainer
    from tests.support.tiny_models import tiny_config

    class Distributed:
        ep_size = 2

    path, args = trainer.model.name_or_path, trainer.args
    own = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    own.config.distributed_config = Distributed()
    stock = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none")
    quantised, wide = BitsAndBytesConfig(load_in_4bit=True), BitsAndBytesConfig(load_in_8bit=True)
    adapter = LoraConfig(target_modules=["q_proj"])
    attempts = {
        "model_init": lambda: FSDPTurboTrainer(model_init=lambda: own, args=args, train_dataset=data),
        "hyperparameter_search": lambda: trainer.hyperparameter_search(n_trials=1),
        "object_with_distributed_config": lambda: FSDPTurboTrainer(own, args=args, train_dataset=data),
        "quantization_config": lambda: FSDPTurboSFTTrainer(
            path, args=args, train_dataset=data, processing_class=tokenizer, quantization_config=quantised
        ),
        "load_in_8bit": lambda: FSDPTurboSFTTrainer(
            path,
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            quantization_config=wide,
            peft_config=adapter,
        ),
        "rows_of_32": lambda: FSDPTurboSFTTrainer(
            path,
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            quantization_config=quantised,
            peft_config=adapter,
        ),
        "stock_arguments": lambda: FSDPTurboTrainer(own, args=stock, train_dataset=data),
        "no_arguments": lambda: FSDPTurboTrainer(own, train_dataset=data),
        "m10_push_offline": lambda: FSDPTurboSFTTrainer(
            path,
            args=replace(args, push_to_hub=True, hub_model_id="somebody/model"),
            train_dataset=data,
            processing_class=tokenizer,
        ),
        "s12_plain_module": lambda: FSDPTurboTrainer(torch.nn.Linear(2, 2), args=args, train_dataset=data),
    }
    assert issubclass(FSDPTurboTrainer, Trainer)
    result = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            result[name] = ("", "no error")
        except Exception as error:  # noqa: BLE001  (the test says which class it has to be)
            result[name] = (type(error).__name__, str(error))
    return result


OF_TRAINERS = {
    "model_init": ("model_init",),
    "hyperparameter_search": ("hyperparameter_search",),
    "object_with_distributed_config": ("distributed_config",),
    "quantization_config": ("load_in_4bit=True", "without an adapter", "peft_config"),
    "load_in_8bit": ("quantization_config", "not supported"),
    "rows_of_32": ("rows of 32 elements", "blocks of 64", "llm_int8_skip_modules"),
    "stock_arguments": ("FSDPTurboArguments", "2 processes", "TrainingArguments"),
    "no_arguments": ("FSDPTurboArguments", "TrainingArguments"),
    "m10_push_offline": ("making the Hub repository (push_to_hub) failed on rank 0 of 2",),
    "s12_plain_module": ("Linear", "no Transformers model"),
}


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory) -> dict[str, str]:
    import json
    import shutil
    from pathlib import Path

    import torch
    from datasets import Dataset
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    def copy(path: str, name: str) -> Path:
        target = tmp_path_factory.mktemp(name) / name
        shutil.copytree(path, target)
        return target

    moe, pieces = tiny("qwen3_moe"), tiny("qwen3_moe", max_shard_size="20KB")
    dense = copy(moe, "dense")
    (dense / "model.safetensors").unlink()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=384, **sizes)).save_pretrained(dense)
    truncated = copy(moe, "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    missing = copy(pieces, "missing")
    next(missing.glob("*-00002-of-*")).unlink()
    lacking = {"missing_tensor": "model.layers.0.mlp.gate.weight"}
    lacking["missing_expert"] = "model.layers.1.mlp.experts.3.up_proj.weight"
    incomplete = {}
    for name, key in lacking.items():
        file = copy(moe, name) / "model.safetensors"
        tensors = load_file(file)
        del tensors[key]
        save_file(tensors, file, metadata={"format": "pt"})
        incomplete[name] = str(file.parent)
    quantised = copy(moe, "quantised")
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantised / "config.json").write_text(json.dumps(config))

    def changed(name: str, **fields: Any) -> str:
        target = copy(moe, name)
        content = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**content, **fields}))
        return str(target)

    def rewritten(name: str, change: Any) -> str:
        file = copy(moe, name) / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        return str(file.parent)

    def moved(tensors: dict[str, Any]) -> None:
        place = "model.layers.1.mlp.experts.{}.up_proj.weight"
        tensors[place.format(9)] = tensors.pop(place.format(1))

    def counted(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].char()

    def packed(tensors: dict[str, Any]) -> None:
        key = "model.layers.1.mlp.experts.2.up_proj.weight"
        tensors[key] = tensors[key].to(torch.float8_e4m3fn)

    def on_disk(folder: Path) -> str:
        Dataset.from_dict({"text": texts(40)}).save_to_disk(folder)
        return str(folder)

    half_packed = Path(rewritten("packed_without_scales", packed))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (half_packed / "config.json").write_text(json.dumps(config))
    outside, linked = copy(pieces, "outside"), copy(pieces, "linked")
    index = outside / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    shard = next(linked.glob("*-00002-of-*"))
    shard.rename(linked.parent / "elsewhere.safetensors")
    shard.symlink_to(linked.parent / "elsewhere.safetensors")
    return {
        **incomplete,
        "moved_expert": rewritten("moved_expert", moved),
        "packed_without_scales": str(half_packed),
        "integer_weights": rewritten("integer_weights", counted),
        "file_outside": str(outside),
        "linked_shard": str(linked),
        "endless_layers": changed("endless_layers", num_hidden_layers=10**9),
        "eps_nan": changed("eps_nan", rms_norm_eps=float("nan")),
        "nine_of_eight": changed("nine_of_eight", num_experts_per_tok=9),
        "moe": moe,
        "rows": on_disk(tmp_path_factory.mktemp("rows") / "rows"),
        "three_experts": tiny("qwen3_moe", num_experts=3),
        "dense": str(dense),
        "truncated": str(truncated),
        "missing_shard": str(missing),
        "quantised": str(quantised),
        "nowhere": str(tmp_path_factory.mktemp("empty") / "nowhere"),
    }


@pytest.fixture(scope="module")
def said(models) -> list[dict[str, tuple[str, str]]]:
    return run_ranks(try_all, 2, models, timeout=150)


@pytest.mark.parametrize("case", OF_TRAINERS)
def test_refused_by_trainers(said, case: str):
    """M10 and S12 among them."""
    for rank in said:
        kind, message = rank[case]
        assert kind == ("CheckpointError" if case == "m10_push_offline" else "ValueError"), (kind, message)
        assert all(part in message for part in OF_TRAINERS[case]), message


@pytest.mark.parametrize("case", SMALL_FILES)
def test_a_limit_on_file_sizes_stops_both_ranks(said, case: str):
    """What one rank cannot write in set-up is named on both, and the next trainer is built."""
    assert len({rank[case] for rank in said}) == 1, [rank[case] for rank in said]
    kind, message = said[0][case]
    assert kind == ("CheckpointError" if SMALL_FILES[case][0] else ""), (kind, message)  # a ValueError
    assert all(part in message for part in SMALL_FILES[case][2]), message


@pytest.mark.parametrize("case", ROWS)
def test_rows_that_cannot_train_stop_both_ranks(said, case: str):
    for rank in said:
        kind, message = rank[case]
        assert kind in ("ValueError", "CheckpointError"), (kind, message)  # the latter is a ValueError
        assert all(part in message for part in ROWS[case][1]), message


@pytest.mark.parametrize("case", CASES)
def test_one_clear_value_error_on_every_rank(said, case: str):
    messages = set()
    for rank in said:
        kind, message = rank[case]
        if case == "no_model_there":  # Transformers' own words
            assert kind == "CheckpointError", (kind, message)  # a ValueError
        elif case in ("output_dir_a_file", "output_dir_long"):  # rank 0 alone makes it
            assert (kind, "on rank 0 of 2" in message) == ("CheckpointError", True), (kind, message)
        elif case == "upstream_missing":
            assert kind in ("ValueError", "MissingDependencyError"), (kind, message)  # the latter is a ValueError too
        else:
            assert kind == "ValueError", (kind, message)
        for part in CASES[case][2]:
            assert part in message, message
        messages.add(message)
    assert len(messages) == 1, messages


def build_arguments(use_cpu: bool) -> tuple[str, str]:
    """Rank function: only the arguments."""
    from hf_fsdpturbo import FSDPTurboTrainingArguments

    os.environ.pop("ACCELERATE_USE_CPU", None)
    try:
        args = FSDPTurboTrainingArguments(tempfile.mkdtemp(), use_cpu=use_cpu, report_to="none", ep_size=2)
        return "", f"world {args.world_size}"
    except ValueError as error:
        return type(error).__name__, str(error)


def test_two_ranks_that_each_think_they_are_alone():
    """Without use_cpu on a CPU machine accelerate joins no process group: two private trainings."""
    import torch

    if torch.accelerator.is_available():
        pytest.skip("needs a machine without an accelerator: there each rank takes one and joins")
    for kind, message in run_ranks(build_arguments, 2, False, timeout=30):
        assert kind == "ValueError"
        assert "WORLD_SIZE=2" in message
        assert "use_cpu" in message
    assert run_ranks(build_arguments, 2, True, timeout=30) == [("", "world 2")] * 2


def one_rank_fails(model: str, bad: str, fields: dict[str, Any]) -> tuple[str, str]:
    """Rank function: rank 1's copy of the checkpoint is damaged, rank 0's is whole (node-local disks)."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

    from hf_fsdpturbo import FSDPTurboSFTConfig, FSDPTurboSFTTrainer

    args = FSDPTurboSFTConfig(**{**DEFAULT_ARGS, "output_dir": tempfile.mkdtemp(), **EP2, **fields})
    path = bad if args.process_index == 1 else model
    data, tokenizer = Dataset.from_dict({"text": texts(4)}), PreTrainedTokenizerFast.from_pretrained(model)
    try:
        FSDPTurboSFTTrainer(path, args=args, train_dataset=data, processing_class=tokenizer)
        return "", "no error"
    except ValueError as error:
        return type(error).__name__, str(error)


ONE_RANK_ALONE = {"truncated": "truncated", "missing_shard": "is missing", "nowhere": "nowhere"}


@pytest.mark.parametrize("init", ["init_on_meta", "init_on_default"])
@pytest.mark.parametrize("damage", ONE_RANK_ALONE)
def test_a_file_that_only_one_rank_finds_damaged_stops_both(models, damage: str, init: str):
    fields = {"init_config": {"name": init}}
    for kind, message in run_ranks(one_rank_fails, 2, models["moe"], models[damage], fields, timeout=40):
        assert kind == "CheckpointError"  # a ValueError
        assert "failed on rank 1 of 2" in message
        assert ONE_RANK_ALONE[damage] in message


def in_one_process(models: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Exception class and message of each damaged checkpoint, by trainer."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

    import hf_fsdpturbo as turbo

    data, tokenizer = Dataset.from_dict({"text": texts(4)}), PreTrainedTokenizerFast.from_pretrained(models["moe"])
    result = {}
    for name in ("moe", "missing_tensor", "missing_expert", "truncated"):
        for trainer, config in (
            (turbo.FSDPTurboTrainer, turbo.FSDPTurboTrainingArguments),
            (turbo.FSDPTurboSFTTrainer, turbo.FSDPTurboSFTConfig),
        ):
            args = config(**{**DEFAULT_ARGS, "output_dir": tempfile.mkdtemp()})
            try:
                trainer(models[name], args=args, train_dataset=data, processing_class=tokenizer)
                result[name, trainer.__name__] = ("", "")
            except Exception as error:  # noqa: BLE001  (the test says which class it has to be)
                result[name, trainer.__name__] = (type(error).__name__, str(error))
    return result


def test_one_process_refuses_what_a_sharded_run_refuses(models):
    named = {
        "missing_tensor": "missing: ['model.layers.0.mlp.gate.weight']",
        "missing_expert": "lacks model.layers.1.mlp.experts.3.up_proj.weight",
        "truncated": "truncated",
    }
    for (name, trainer), (kind, message) in run_plain(in_one_process, models, timeout=60).items():
        assert kind == ("" if name == "moe" else "ValueError"), (trainer, kind, message)
        assert named.get(name, "") in message, (trainer, message)


def changed_after_construction() -> tuple[str, str]:
    from hf_fsdpturbo import FSDPTurboTrainingArguments

    args = FSDPTurboTrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none")
    args.ep_size = 2
    try:
        return "", str(args.fsdpturbo_params)
    except ValueError as error:
        return type(error).__name__, str(error)


def test_a_size_assigned_too_late_is_an_error():
    for kind, message in run_ranks(changed_after_construction, 2, timeout=30):
        assert kind == "ValueError"
        assert "ep_size was changed" in message
