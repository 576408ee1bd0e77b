"""LoRA on attention and experts equals one process of stock PEFT and TRL; files, resume, merged export, refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from hf_fsdpturbo import cli
from tests.support.adapter_runs import (
    adapter_tensors,
    as_peft,
    in_peft_layout,
    load_and_save,
    lora,
    plain_adapter,
    plain_logits,
    train_and_save,
    train_and_stop,
)
from tests.support.compare import TOLERANCE, compare, distance
from tests.support.hand_counts import assert_load
from tests.support.preference_runs import Preference, against_one_process, pairs, turbo_ranks
from tests.support.reference_run import Run, build_trainer, forget_accelerate, whole_parameters
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import texts

ACCUMULATE = {"gradient_accumulation_steps": 2}
RECOMPUTE = {"gradient_checkpointing": True}
EP2, EP4 = {"ep_size": 2}, {"ep_size": 4}
ALL_LINEAR = {"target_modules": "all-linear", "target_parameters": None}
ATTENTION = {"target_parameters": None}
ONE_PARAMETER = {"target_modules": None, "target_parameters": ["mlp.experts.gate_up_proj"], "use_rslora": True}

HSDP = {"ep_size": 2, "mp_replicate_size": 2}
ONE_EXPERT = {"num_experts": 2, "top_k": 1}
EP2_RUNS: dict[str, tuple[str, dict, dict, dict]] = {
    "sft": ("sft", {**ACCUMULATE, **RECOMPUTE}, {}, {}),
    "attention": ("sft", {}, ATTENTION, {}),
    "one_parameter": ("sft", {}, ONE_PARAMETER, {}),
    "fused": ("sft", RECOMPUTE, {}, {}),
    "dpo": ("dpo", {**ACCUMULATE, **RECOMPUTE}, {}, {}),
    "all_linear": ("dpo", {}, ALL_LINEAR, {}),
    "reward": ("reward", {}, {"task_type": "SEQ_CLS"}, {}),
}
# layout -> (ranks, hf_fsdpturbo fields, run -> (trainer, training arguments, LoRA changes, model changes))
RUNS: dict[str, tuple[int, dict, dict[str, tuple[str, dict, dict, dict]]]] = {
    "ep2": (2, EP2, EP2_RUNS),
    # a plain load of Qwen3.5 draws numbers, which the adapter's own draw comes after
    "ep1": (
        2,
        {"ep_size": 1},
        {"sft": ("sft", {}, {}, {}), "after_a_draw": ("sft", {}, {}, {"kind": "qwen3_5_moe"})},
    ),
    # two nodes of two ranks: the exchange has two stages
    "ep4": (4, {**EP4, "ranks_per_node": 2, "ep_dispatcher": "fused"}, {"sft": ("sft", RECOMPUTE, {}, {})}),
    # one expert a rank: base on its input dims, factors on the features they share with it
    "ep2_efsdp2": (
        4,
        EP2,
        {"dpo": ("dpo", ACCUMULATE, {}, {}), "one_expert": ("sft", RECOMPUTE, {}, ONE_EXPERT)},
    ),
    "hsdp2_ep2": (4, HSDP, {"sft": ("sft", {}, {}, {})}),
}
HEAD = {"fused_linear_cross_entropy": "on"}  # its head is frozen
MORE_TURBO = {"fused": {"ep_dispatcher": "fused", **HEAD}, "one_expert": HEAD}
CASES = [(layout, name) for layout, (_, _, runs) in RUNS.items() for name in runs]


def data_of(trainer: str) -> dict[str, list[str]]:
    if trainer == "sft":
        return {"text": texts(64)}
    return {n: column for n, column in pairs(64).items() if trainer == "dpo" or n != "prompt"}


@pytest.fixture(scope="module")
def outcome(tiny: Callable[..., str]) -> Callable[[str], dict]:
    done: dict[str, dict] = {}

    def get(layout: str) -> dict:
        if layout not in done:
            world_size, turbo, runs = RUNS[layout]
            jobs = {}
            for name, (trainer, args, changes, model) in runs.items():
                kwargs, more = {"peft_config": lora(**changes)}, {**turbo, **MORE_TURBO.get(name, {})}
                path = tiny(**{"kind": "qwen3_moe", **model})
                run = Run(path, data_of(trainer), args, more, trainer, trainer_kwargs=kwargs)
                jobs[name] = Preference(run)
            done[layout] = against_one_process(jobs, world_size, yardstick=True)
        return done[layout]

    return get


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_equals_one_process(outcome, layout, run):
    """Adapters start as stock PEFT draws them, too. After one Adam step lora_B is lr times a sign: near-zero gradients
    make lora_A's next gradient ill-conditioned, hence the yardstick."""
    record, reference, yardstick = outcome(layout)[run]
    assert_load(record, reference)
    comparison = compare(as_peft(record), reference, yardstick=yardstick)
    print(comparison.report)
    assert comparison, comparison.report
    assert len(record.gradients) == 3


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_frozen_weights_have_no_gradient_and_no_optimizer_state(outcome, layout, run):
    record, reference, _ = outcome(layout)[run]
    assert record.trainable == reference.trainable
    assert all("lora_" in name or "modules_to_save" in name for name in record.trainable)
    assert set(record.with_optimizer_state) == set(record.trainable)
    assert set(record.gradients[0]) == set(record.trainable)


def starts(runs: list[Run]) -> list[dict[str, torch.Tensor]]:
    """Rank function: whole weights each run starts from."""
    found = []
    for run in runs:
        forget_accelerate()
        found.append(in_peft_layout(whole_parameters(build_trainer(run, turbo=True).model)))
    return found


def test_every_way_of_loading_starts_alike(tiny):
    """From slices, from rank 0, from whole models; the reward head, which is drawn before the adapter, included."""
    common = {"peft_config": lora(task_type="SEQ_CLS")}
    runs = [
        Run(
            tiny("qwen3_moe"), data_of("reward"), {}, {**EP2, "init_config": {"name": name}}, "reward",
            trainer_kwargs=common,
        )
        for name in ("init_on_meta", "init_on_rank0", "init_on_default")
    ]  # fmt: skip
    first, *others = run_ranks(starts, 2, runs, timeout=120)[0]
    assert any("modules_to_save" in name for name in first)
    for other in others:
        assert set(other) == set(first)
        assert all(torch.equal(other[name], first[name]) for name in first)


# Files


def sft(path: str, folder: str, turbo: dict, **args) -> Run:
    arguments = {"output_dir": folder, **args}
    return Run(path, data_of("sft"), arguments, turbo, "sft", trainer_kwargs={"peft_config": lora()}, gradients=False)


@pytest.mark.parametrize(("world_size", "turbo"), [(2, EP2), (4, EP2)])
def test_saved_adapter_and_merged_model_load_in_plain_peft(tiny, tmp_path, world_size, turbo):
    path = tiny("qwen3_moe")
    run = sft(path, str(tmp_path / "run"), turbo)
    found = run_ranks(train_and_save, world_size, run, str(tmp_path), timeout=120)[0]
    file = adapter_tensors(str(tmp_path / "adapter"))
    assert len(file) == 16
    for name, tensor in file.items():
        assert torch.equal(tensor, found["weights"][name.replace(".weight", ".default.weight")]), name
    untrained = plain_logits(path, None)
    for logits in (
        plain_logits(path, str(tmp_path / "adapter")),
        plain_logits(str(tmp_path / "merged"), None),
    ):
        assert distance(found["logits"], logits) < TOLERANCE
    assert distance(found["logits"], untrained) > 1e-3
    assert sorted(os.listdir(tmp_path / "merged")) == sorted(
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    )


def test_plain_adapter_loads_here_and_is_saved_bit_equal(tiny, tmp_path):
    path, source = tiny("qwen3_moe"), str(tmp_path / "plain")
    plain_adapter(path, source)
    expected, before = plain_logits(path, source), adapter_tensors(source)
    for world_size, turbo in ((2, EP2), (4, EP2)):
        folder = str(tmp_path / f"saved{world_size}")
        run = sft(path, str(tmp_path / "run"), turbo)
        logits = run_ranks(load_and_save, world_size, run, source, folder, timeout=90)[0]
        assert distance(logits, expected) < TOLERANCE
        after = adapter_tensors(folder)
        assert set(after) == set(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
    wrong = run_ranks(load_and_save, 2, sft(path, str(tmp_path / "run"), EP2), source, str(tmp_path / "w"), True)[0]
    assert distance(wrong, expected) > 1e-2, "the fault is not seen"


def test_resume_at_the_same_and_another_topology(tiny, tmp_path):
    path = tiny("qwen3_moe")
    args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4}
    args["router_aux_loss_coef"] = 0.0  # a statistic of a micro-batch: four ranks cut the same batch otherwise
    first = str(tmp_path / "first")
    expected = run_ranks(train_and_stop, 2, sft(path, first, EP2, **args), None, timeout=120)[0]
    checkpoint = os.path.join(first, "checkpoint-2")
    assert os.path.exists(os.path.join(checkpoint, "adapter_model.safetensors"))
    exports_as_plain_peft(path, checkpoint, tmp_path)
    again = run_ranks(train_and_stop, 2, sft(path, str(tmp_path / "second"), EP2, **args), checkpoint, timeout=120)[0]
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    half = {**args, "per_device_train_batch_size": 2}
    other = run_ranks(train_and_stop, 4, sft(path, str(tmp_path / "third"), EP4, **half), checkpoint, timeout=120)[0]
    worst = max(distance(other[name], expected[name]) for name in expected)
    print(f"ep2 -> ep4: {worst:.1e}")
    assert worst < 1e-4
    start = run_ranks(train_and_stop, 2, sft(path, str(tmp_path / "4"), EP2, **{**args, "max_steps": 1}), None)[0]
    assert max(distance(start[name], expected[name]) for name in expected) > 1e-2


def exports_as_plain_peft(path: str, checkpoint: str, folder: Path) -> None:
    """`export`: the adapter from the shards, bit-equal to the file that was saved beside them; merged as by PEFT."""
    assert cli.main(["export", checkpoint, str(folder / "adapter")]) == 0
    found, saved = adapter_tensors(str(folder / "adapter")), adapter_tensors(checkpoint)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert "optimizer.json" not in os.listdir(folder / "adapter")
    assert cli.main(["export", checkpoint, str(folder / "merged"), "--merge"]) == 0
    assert distance(plain_logits(str(folder / "merged"), None), plain_logits(path, checkpoint)) < TOLERANCE
    assert "adapter_config.json" not in os.listdir(folder / "merged")


def dtype_runs(runs: list[Run]) -> list[dict[str, object]]:
    """Rank function."""
    return [dtype_run(run) for run in runs]


def dtype_run(run: Run) -> dict[str, object]:
    """Three steps of float32 adapters on a base of any dtype."""
    forget_accelerate()
    trainer = build_trainer(run, turbo=True)
    before = in_peft_layout(whole_parameters(trainer.model))
    trainer.train()
    after = in_peft_layout(whole_parameters(trainer.model))
    return {
        "units": trainer.sharding_report.dense_units,
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "before": before,
        "after": after,
    }


def test_float32_adapters_on_a_bf16_base(tiny):
    """They live in their layer's unit, train in float32, and follow the float32 run as closely as bf16 allows."""
    common = {"trainer_kwargs": {"peft_config": lora()}, "gradients": False}
    path, rows = tiny("qwen3_moe"), data_of("sft")
    bf16 = Run(path, rows, {"bf16": True}, EP2, "sft", model_kwargs={"dtype": "bfloat16"}, **common)
    plain = Run(path, rows, {}, EP2, "sft", **common)
    found, expected = run_ranks(dtype_runs, 2, [bf16, plain], timeout=120)[0]
    assert found["units"] == expected["units"] == 3
    for name, tensor in found["after"].items():
        adapter = "lora_" in name
        assert tensor.dtype == (torch.float32 if adapter else torch.bfloat16), name
        assert torch.equal(tensor, found["before"][name]) != adapter, name
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-3)


# Refusals through the trainer


REFUSED: list[tuple[str, dict, str]] = [
    ("sft", {"lora_dropout": 0.05}, "--lora_dropout 0"),
    ("sft", {"lora_dropout": 0.05, **ALL_LINEAR}, "lora_dropout"),
    ("sft", {"target_parameters": ["experts.gate_proj"]}, "mlp.experts.gate_up_proj"),
    ("dpo", {"use_dora": True, **ATTENTION}, "use_dora"),
]


def refusals(runs: list[Run]) -> list[str]:
    """Rank function: what each run says instead of training."""
    said = []
    for run in runs:
        forget_accelerate()
        try:
            turbo_ranks([Preference(run)])
            said.append("no error")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def refused(tiny) -> list[list[str]]:
    """What each rank said to each run, all in one spawn."""
    path = tiny("qwen3_moe")
    runs = [
        Run(path, data_of(trainer), {}, EP2, trainer, trainer_kwargs={"peft_config": lora(**changes)})
        for trainer, changes, _ in REFUSED
    ]
    return run_ranks(refusals, 2, runs, timeout=90)


@pytest.mark.parametrize(("trainer", "changes", "text"), REFUSED)
def test_refused_by_name(refused, trainer, changes, text):
    for said in refused:
        assert text in said[REFUSED.index((trainer, changes, text))]


def dpo_from_adapter(path: str, adapter: str, how: str, folder: str) -> dict[str, Any]:
    """DPO that starts from an adapter: as a PEFT model or (ours) the folder of its files; "plain" is TRL.

    Returns:
        losses, norms and margins of each step, trained factors in PEFT's layout, names of the saved files.
    """
    import trl
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    import hf_fsdpturbo
    from tests.support.records import DEFAULT_ARGS
    from tests.support.tiny_models import tiny_tokenizer

    forget_accelerate()
    args = {**DEFAULT_ARGS, "output_dir": folder, "max_length": 48, "router_aux_loss_coef": 0.0}  # a batch statistic
    ours = how != "plain"
    trainer_class = hf_fsdpturbo.FSDPTurboDPOTrainer if ours else trl.DPOTrainer
    config = hf_fsdpturbo.FSDPTurboDPOConfig if ours else trl.DPOConfig
    args |= EP2 if ours else {"per_device_train_batch_size": 4}  # the batches of both ranks
    model: Any = adapter
    if how != "path":
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    elif ours:
        args["model_init_kwargs"] = {"dtype": torch.float32}
    trainer = trainer_class(
        model=model,
        args=config(**args),
        train_dataset=Dataset.from_dict(data_of("dpo")),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    names = ("loss", "grad_norm", "rewards/margins")
    logs = [[log[name] for name in names if name in log] for log in trainer.state.log_history]
    trainer.save_model(folder)
    weights = in_peft_layout(whole_parameters(trainer.model))
    trained = {name: tensor for name, tensor in weights.items() if "lora_" in name}
    return {"logs": logs[:3], "weights": trained}


def dpo_from_adapters(path: str, adapter: str, folder: str) -> dict[str, dict[str, Any]]:
    """Rank function: both forms."""
    return {how: dpo_from_adapter(path, adapter, how, f"{folder}/{how}") for how in ("object", "path")}


def test_s10_dpo_from_an_adapter_has_that_adapter_as_its_reference(tiny, tmp_path):
    path, adapter = tiny("qwen3_moe"), str(tmp_path / "adapter")
    run_plain(plain_adapter, path, adapter)
    plain = run_plain(dpo_from_adapter, path, adapter, "plain", str(tmp_path / "plain"))
    assert abs(plain["logs"][0][2]) < 1e-6, "the first margin of plain TRL is 0"
    found = run_ranks(dpo_from_adapters, 2, path, adapter, str(tmp_path), timeout=120)[0]
    for how, ours in found.items():
        for mine, theirs in zip(ours["logs"], plain["logs"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6), how
        assert ours["weights"].keys() == plain["weights"].keys()
        for name, tensor in plain["weights"].items():
            torch.testing.assert_close(ours["weights"][name], tensor, rtol=2e-4, atol=1e-6, msg=f"{how}: {name}")
        saved = adapter_tensors(str(tmp_path / how))
        assert saved.keys() == adapter_tensors(adapter).keys(), "an adapter's files, as those it started from"
