"""What the arguments refuse by name: each row of the decision table that shows in them."""

import dataclasses
import json
import logging
import os
from types import SimpleNamespace

import pytest

from hf_fsdpturbo import launch_config
from hf_fsdpturbo.arguments import FSDPTurboTrainingArguments, turbo_arguments


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("FSDPTURBO_", "ACCELERATE_")) or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(turbo_arguments, "_warned", set())


@pytest.fixture
def build(tmp_path):
    def make(**kwargs):
        return FSDPTurboTrainingArguments(
            **{"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", **kwargs}
        )

    return make


def raises_naming(call, *words):
    with pytest.raises(ValueError, match=".") as caught:
        call()
    for word in words:
        assert str(word) in str(caught.value), f"{word!r} is not in: {caught.value}"


def pretend_world(monkeypatch, size):
    monkeypatch.setattr(launch_config, "world_size", lambda: size)
    monkeypatch.setattr(FSDPTurboTrainingArguments, "world_size", property(lambda self: size))


ONLY_SHARDED = [
    ({"fp16": True}, ["fp16=True", "bf16"]),
    ({"fp16_full_eval": True}, ["fp16_full_eval=True"]),
    ({"torch_compile": True}, ["torch_compile=True"]),
    ({"torch_compile_backend": "inductor"}, ["torch_compile_backend", "inductor"]),
    ({"torch_compile_mode": "default"}, ["torch_compile_mode", "default"]),
    ({"auto_find_batch_size": True}, ["auto_find_batch_size=True"]),
]


@pytest.mark.parametrize(("kwargs", "words"), ONLY_SHARDED)
def test_item_5_refused_by_name_in_sharded_runs_only(build, monkeypatch, kwargs, words):
    build(**kwargs)
    pretend_world(monkeypatch, 2)
    raises_naming(lambda: build(**kwargs), *words)


def test_item_5_stock_arguments_in_one_process(tmp_path, monkeypatch):
    """The environment's settings hold beside them; in a run of several processes they are refused by name."""
    from transformers import TrainingArguments

    from hf_fsdpturbo.arguments import settings_beside

    stock = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", ddp_timeout=77)
    monkeypatch.setenv("FSDPTURBO_DIST_CONFIG", '{"param_storage_dtype": "bfloat16"}')
    beside = settings_beside(stock)
    assert beside.fsdpturbo_params.param_storage_dtype == "bfloat16"
    assert (beside.output_dir, beside.ddp_timeout, beside.ep_size) == (str(tmp_path), 77, 1)
    assert not hasattr(stock, "dist_config")
    raises_naming(lambda: settings_beside(SimpleNamespace()), "args must extend FSDPTurboArguments", "SimpleNamespace")
    monkeypatch.setattr(launch_config, "world_size", lambda: 2)
    raises_naming(lambda: settings_beside(stock), "args must extend", "2 processes", "TrainingArguments")


def test_item_7_checkpoint_formats(build):
    assert build().checkpoint_format is None
    assert build(checkpoint_format="both").checkpoint_format == "both"
    raises_naming(lambda: build(checkpoint_format="safetensors"), "checkpoint_format", "'safetensors'", "dcp", "hub")


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, ["deepspeed", "stage", "DeepSpeed"]),
        ({"deepspeed": "ds.json"}, ["deepspeed", "ds.json"]),
        ({"fsdp": "full_shard"}, ["fsdp", "full_shard"]),
        ({"fsdp": True}, ["fsdp=True"]),
        ({"fsdp_config": {"version": 2}}, ["fsdp_config", "version"]),
        ({"dist_config": {"offload_params": True}}, ["pin_memory=True", "accelerator", "offload_params"]),
        ({"dist_config": {"hook_modules": ["model"]}}, ["hook_modules=['model']", "ep_backend"]),
        ({"dist_config": {"fsdp_implementation": "custom"}}, ["fsdp_implementation='custom'", "ep_backend"]),
        ({"use_liger_kernel": True, "kernel_config": {"name": "auto, liger"}}, ["use_liger_kernel", "kernel_config"]),
    ],
)
def test_refused_by_name(build, kwargs, words):
    raises_naming(lambda: build(**kwargs), *words)


@pytest.mark.parametrize(
    "name",
    [
        "adamw_bnb_8bit",
        "adamw_8bit",
        "adamw_torch_8bit",
        "adamw_torch_4bit",
        "lion_8bit",
        "paged_adamw_8bit",
        "ademamix_8bit",
        "rmsprop_bnb_8bit",
        "galore_adamw_8bit",
        "muon",
    ],
)
def test_unproven_optimizers_are_refused(build, name, monkeypatch):
    pretend_world(monkeypatch, 2)
    raises_naming(lambda: build(optim=name), f"optim='{name}'", "adamw_torch")


def test_every_low_bit_optimizer_of_transformers_is_covered(build, monkeypatch):
    pretend_world(monkeypatch, 2)
    from transformers.training_args import OptimizerNames

    low_bit = [o for o in OptimizerNames if any(part in o.value for part in ("8bit", "4bit", "muon"))]
    assert len(low_bit) > 8
    for optimizer in low_bit:
        raises_naming(lambda optimizer=optimizer: build(optim=optimizer), optimizer.value)


SHARDABLE = {"adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision",
             "sgd", "adagrad", "rmsprop", "grokadamw", "schedule_free_radam", "schedule_free_adamw",
             "schedule_free_sgd"}  # fmt: skip


def test_optimizers_that_need_whole_tensors_are_refused_in_sharded_runs_only(build, monkeypatch):
    from transformers.training_args import OptimizerNames

    build(optim="adafactor")
    pretend_world(monkeypatch, 2)
    for optimizer in OptimizerNames:
        if optimizer.value in SHARDABLE:
            build(optim=optimizer.value)
        else:
            raises_naming(lambda name=optimizer.value: build(optim=name), f"optim='{optimizer.value}'", "adamw_torch.")


# ---- Liger ----


def test_liger_never_gets_at_the_experts(build, monkeypatch, caplog):
    assert build(use_liger_kernel=True).liger_kernel_config is None  # one process: nothing is routed
    pretend_world(monkeypatch, 2)
    with caplog.at_level(logging.WARNING, logger="hf_fsdpturbo"):
        args = build(use_liger_kernel=True, liger_kernel_config={"rope": False})
    assert args.liger_kernel_config == {"rope": False, "swiglu": False}
    assert dataclasses.replace(args).liger_kernel_config == args.liger_kernel_config
    assert "Dense MLPs" in caplog.text
    assert build(liger_kernel_config={"swiglu": True}).liger_kernel_config == {"swiglu": True}  # not used
    raises_naming(
        lambda: build(use_liger_kernel=True, liger_kernel_config={"swiglu": True}),
        "liger_kernel_config swiglu=True",
        "experts",
        "Leave swiglu out",
    )


def test_liger_twice_is_refused_where_auto_means_liger(build, monkeypatch):
    import torch

    both = {"use_liger_kernel": True, "kernel_config": {"name": "auto"}}
    build(**both)
    on_cuda = property(lambda self: (self._setup_devices, torch.device("cuda"))[1])
    monkeypatch.setattr(FSDPTurboTrainingArguments, "device", on_cuda)
    raises_naming(lambda: build(**both), "use_liger_kernel", "kernel_config name 'auto'", "Keep one")
    build(use_liger_kernel=True, kernel_config={"name": "flash-linear-attention"})


@pytest.mark.parametrize("field", ["cp_size", "sp_size", "tp_size", "dp_shard_size", "dp_replicate_size"])
def test_parallelism_config_is_refused(build, field):
    sizes = {"cp_size": 1, "sp_size": 1, "tp_size": 1, "dp_shard_size": 1, "dp_replicate_size": 1}
    raises_naming(
        lambda: build(parallelism_config=SimpleNamespace(**{**sizes, field: 2})), "parallelism_config", field, "2"
    )


@pytest.mark.parametrize("name", ["quantization_config", "distributed_config", "load_in_8bit", "tp_plan"])
def test_model_keywords_are_refused(build, name, monkeypatch):
    monkeypatch.setattr(FSDPTurboTrainingArguments, "model_init_kwargs", {name: {"x": 1}}, raising=False)
    raises_naming(build, f"model_init_kwargs {name}", "'x': 1")


def test_what_is_supported_passes(build):
    args = build(
        optim="adamw_torch_fused",
        bf16=True,
        use_liger_kernel=True,
        kernel_config={"name": "auto"},
        dist_config={"ep_backend": "fsdp_turbo", "hook_modules": ["model"], "fsdp_implementation": "custom"},
        accelerator_config={"split_batches": False},
        gradient_checkpointing=True,
    )
    assert args.fsdpturbo_params.hook_modules == ["model"]


# ---- context parallelism ----


def test_context_parallelism_takes_over_batch_dispatch(build, monkeypatch):
    pretend_world(monkeypatch, 2)
    assert build(cp_size=2).accelerator_config.dispatch_batches is False
    assert (
        build(cp_size=2, accelerator_config={"dispatch_batches": False}).accelerator_config.dispatch_batches is False
    )
    assert build().accelerator_config.dispatch_batches is None


@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches"])
def test_context_parallelism_refuses_slicing_by_rank(build, tmp_path, name, monkeypatch):
    pretend_world(monkeypatch, 2)
    raises_naming(lambda: build(cp_size=2, accelerator_config={name: True}), f"accelerator_config {name}", "cp_size=2")
    path = tmp_path / "accelerator.json"
    path.write_text(json.dumps({name: True}))
    raises_naming(lambda: build(cp_size=2, accelerator_config=str(path)), f"accelerator_config {name}", "cp_size=2")
    assert getattr(build(accelerator_config={name: True}).accelerator_config, name) is True


def test_context_parallelism_refuses_batch_rebalance(build):
    raises_naming(
        lambda: build(cp_size=2, train_sampling_strategy="batch_rebalance"),
        "train_sampling_strategy",
        "batch_rebalance",
    )
    build(train_sampling_strategy="batch_rebalance")


# ---- what the launcher exported, and warnings ----


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("ACCELERATE_USE_FSDP", "true"),
        ("ACCELERATE_USE_MEGATRON_LM", "1"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
        ("ACCELERATE_MIXED_PRECISION", "fp16"),
        ("ACCELERATE_MIXED_PRECISION", "fp8"),
    ],
)
def test_what_the_launcher_exported_is_refused(build, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    raises_naming(build, name, value)


def test_what_the_launcher_exports_by_default_is_fine(build, monkeypatch):
    for name, value in (("ACCELERATE_MIXED_PRECISION", "no"), ("ACCELERATE_DYNAMO_BACKEND", "NO")):
        monkeypatch.setenv(name, value)
    build()


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ({"dist_config": {"pin_memory": False}}, "pin_memory"),
    ],
)
def test_harmless_settings_warn_once_on_rank_0(build, caplog, monkeypatch, kwargs, word):
    with caplog.at_level(logging.WARNING, logger="hf_fsdpturbo"):
        build(**kwargs)
        build(**kwargs)
        build()
    assert sum(word in r.getMessage() for r in caplog.records) == 1
    caplog.clear()
    monkeypatch.setattr(turbo_arguments, "_warned", set())
    monkeypatch.setattr(turbo_arguments.launch_config, "rank", lambda: 1)
    with caplog.at_level(logging.WARNING, logger="hf_fsdpturbo"):
        build(**kwargs)
    assert word not in caplog.text
