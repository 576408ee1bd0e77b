"""DPO equals one process of stock TRL, with the reference model given in every way and never whole on a rank."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.compare import TOLERANCE, compare, distance
from tests.support.hand_counts import assert_load
from tests.support.preference_runs import (
    Preference,
    against_one_process,
    evaluated,
    pairs,
    stock_ranks,
    turbo_ranks,
    values,
)
from tests.support.reference_run import Run, build_trainer, whole
from tests.support.spawn import RankError, run_plain, run_ranks

ACCUMULATE = {"gradient_accumulation_steps": 2}
RECOMPUTE = {"gradient_checkpointing": True}
SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
TWO_LOSSES = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
EP2, EP4 = {"ep_size": 2}, {"ep_size": 4}

LAYOUTS = {"ep2": (2, EP2), "ep4": (4, EP4), "ep2_efsdp2": (4, EP2)}
# layout -> run -> (family, training arguments, how the reference is given)
RUNS: dict[str, dict[str, tuple[str, dict, str]]] = {
    "ep2": {
        "none": ("qwen3_moe", {}, "none"),
        "path": ("qwen3_moe", {**ACCUMULATE, **RECOMPUTE}, "path"),
        "object": ("qwen3_moe", {"loss_type": ["ipo"]}, "object"),
        "precomputed": ("qwen3_moe", {**ACCUMULATE, "loss_type": ["apo_zero"]}, "precomputed"),
        "sync": ("qwen3_moe", SYNC, "none"),
        "kept_whole": ("qwen3_moe", SYNC, "path"),
        "qwen3_5": ("qwen3_5_moe", RECOMPUTE, "none"),
    },
    "ep4": {"path": ("qwen3_moe", {**ACCUMULATE, "loss_type": ["ipo"]}, "path")},
    "ep2_efsdp2": {
        "none": ("qwen3_moe", {**ACCUMULATE, **RECOMPUTE}, "none"),
        "precomputed": ("qwen3_moe", TWO_LOSSES, "precomputed"),
    },
}
MORE_TURBO = {"kept_whole": {"dist_config": {"reshard_after_forward": False}}}
CASES = [(layout, name) for layout, runs in RUNS.items() for name in runs]


def look_at_reference(trainer: Any) -> dict[str, Any]:
    """Hook after training: elements of policy and reference on this rank, and some whole tensors of the reference."""

    def local(model: torch.nn.Module) -> int:
        return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())

    reference = trainer.ref_model
    if reference is None:
        return {}
    names = ("lm_head.weight", "model.layers.0.mlp.experts.down_proj", "model.layers.1.input_layernorm.weight")
    return {
        "policy": local(trainer.model),
        "reference": local(reference),
        "whole": sum(p.numel() for p in reference.parameters()),
        "tensors": {name: whole(reference.get_parameter(name)) for name in names},
    }


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Precomputed log-probabilities go through the data set's cache folder, which an in-memory set does not share."""
    from datasets import Dataset

    folder = str(tmp_path_factory.mktemp("pairs"))
    Dataset.from_dict(pairs(48)).save_to_disk(folder)
    return folder


@pytest.fixture(scope="module")
def outcome(tiny: Callable[..., str], on_disk: str) -> Callable[[str], dict]:
    done: dict[str, dict] = {}

    def get(layout: str) -> dict:
        if layout not in done:
            world_size, turbo = LAYOUTS[layout]
            jobs = {}
            for name, (family, args, how) in RUNS[layout].items():
                config = {"layers": 4} if family == "qwen3_5_moe" else {}
                more = {**turbo, **MORE_TURBO.get(name, {})}
                run = Run(tiny(family, **config), on_disk, args, more, "dpo", after_train=look_at_reference)
                jobs[name] = Preference(run, how, tiny(family, seed=3, **config))
            done[layout] = against_one_process(jobs, world_size, yardstick=layout == "ep4")
        return done[layout]

    return get


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_equals_one_process(outcome, layout, run):
    """On some processors IPO's third gradient of a first layer's k_norm is 2e-5 off: ill-conditioned, see there."""
    record, reference, yardstick = outcome(layout)[run]
    assert_load(record, reference)
    comparison = compare(record, reference, yardstick=yardstick)
    print(comparison.report)
    assert comparison, comparison.report
    assert len(record.gradients) == 3
    assert record.losses[0] > 0.3
    assert any("aux_loss" in log for log in record.log_history)


@pytest.mark.parametrize(("layout", "run"), [case for case in CASES if RUNS[case[0]][case[1]][2] != "precomputed"])
def test_reference_is_sharded_like_the_policy(outcome, layout, run):
    """On every rank as many elements as the policy has there; the parts add up to one model."""
    record, reference, _ = outcome(layout)[run]
    found = [rank.extra["after"] for rank in record.extra["ranks"]]
    assert [f["reference"] for f in found] == [f["policy"] for f in found]
    assert sum(f["reference"] for f in found) == found[0]["whole"]
    plain = reference.extra["after"]["tensors"]
    for name, tensor in found[0]["tensors"].items():
        assert distance(tensor, plain[name]) < TOLERANCE, name


def test_reference_follows_the_policy_when_synced(outcome):
    """The comparison above means something: the synced reference has left its start."""
    synced, fixed = (outcome("ep2")[name][0].extra["after"]["tensors"] for name in ("sync", "none"))
    assert distance(synced["lm_head.weight"], fixed["lm_head.weight"]) > 1e-3


# What the trainer logs, against stock TRL on the same ranks


def logs_of(job: Preference) -> list[dict[str, Any]]:
    return turbo_ranks([job])[0].extra["after"]


def evaluate(trainer: Any) -> list[dict[str, Any]]:
    """Hook after training."""
    trainer.evaluate()
    return list(trainer.state.log_history)


def test_logged_names_and_values_are_stock(tiny):
    run = Run(
        tiny("qwen3_moe"), pairs(24), ACCUMULATE, EP2, "dpo", after_train=evaluate, eval_data=pairs(8, seed=9)
    )
    job = Preference(run, "path", tiny("qwen3_moe", seed=3))
    ours = values(run_ranks(logs_of, 2, job, timeout=120)[0])
    stock = values(run_ranks(stock_ranks, 2, [job], timeout=120)[0][0])
    assert [sorted(log) for log in ours] == [sorted(log) for log in stock]
    assert {"rewards/margins", "logps/chosen", "aux_loss", "grad_norm"} <= set(ours[0])
    assert {"eval_rewards/accuracies", "eval_loss"} <= set(ours[-1])
    for log, other in zip(ours, stock, strict=True):
        for name, value in log.items():
            assert value == pytest.approx(other[name], rel=1e-4, abs=2e-6), name


def test_evaluation_counts_each_sample_once(tiny):
    """Seven pairs, two a rank: the last batch has 2 and 1 real ones. As one process with batches of four."""
    args = {"router_aux_loss_coef": 0.0}  # a statistic of a micro-batch, so another one on four pairs
    run = Run(tiny("qwen3_moe"), pairs(8), args, EP2, "dpo", eval_data=pairs(7, seed=9))
    job = Preference(run, "path", tiny("qwen3_moe", seed=3))
    plain = Preference(replace(run, args={**args, "per_device_eval_batch_size": 4}), "path", job.reference)
    expected = run_plain(evaluated, plain, False)
    assert len(expected) > 10
    for found in run_ranks(evaluated, 2, job, True, timeout=90):
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    wrong = run_ranks(evaluated, 2, job, True, True, timeout=90)[0]
    different = [n for n, value in expected.items() if wrong[n] != pytest.approx(value, rel=1e-3, abs=1e-5)]
    assert {"eval_loss", "eval_rewards/margins", "eval_logps/chosen"} <= set(different), "the fault is not seen"


# Faults put back


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def attempt(job: Preference, fault: str) -> str:
    """Rank function: the error of a run with a fault put back."""
    from hf_fsdpturbo.parallelize import order

    nothing = {
        "unsharded after forward": ("reshard_without_backward", lambda module, args, output: None),
        "stock hash": ("hash_shards", None),
    }
    name, value = nothing[fault]
    if fault == "stock hash":
        from trl.trainer.utils import hash_module

        from hf_fsdpturbo.trainer import set_up

        with replaced(set_up, name, hash_module):
            return _error(job)
    with replaced(order, name, value):
        return _error(job)


def _error(job: Preference) -> str:
    try:
        turbo_ranks([job])
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("fault", "args", "how"),
    [
        ("unsharded after forward", SYNC, "none"),
        ("stock hash", {}, "precomputed"),
    ],
)
def test_faults_are_seen(tiny, on_disk, fault, args, how):
    """Both pieces of ours are still needed: without them the run ends with an error of torch."""
    run = Run(tiny("qwen3_moe"), on_disk, args, {**EP2, **MORE_TURBO["kept_whole"]}, "dpo")
    errors = run_ranks(attempt, 2, Preference(run, how), fault, timeout=120)
    print(errors)
    assert all(errors)


def build_only(run: Run) -> None:
    build_trainer(run, turbo=True)


def same_object(run: Run) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    _train(run, model=model, ref_model=model)


def no_path(run: Run) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(run.model)
    config._name_or_path = ""
    _train(run, model=AutoModelForCausalLM.from_config(config), ref_model=None)


def _train(run: Run, **models: Any) -> None:
    from datasets import Dataset

    from hf_fsdpturbo import FSDPTurboDPOConfig, FSDPTurboDPOTrainer
    from tests.support.tiny_models import tiny_tokenizer

    args = FSDPTurboDPOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to="none", **run.turbo)
    data = Dataset.from_dict(run.data)
    FSDPTurboDPOTrainer(args=args, train_dataset=data, processing_class=tiny_tokenizer(), **models)


@pytest.mark.parametrize(("function", "text"), [(same_object, "same object"), (no_path, "Pass ref_model")])
def test_refused(tiny, function, text):
    with pytest.raises(RankError) as caught:
        run_ranks(function, 2, Run(tiny("qwen3_moe"), pairs(4), {}, EP2, "dpo"), timeout=60)
    assert caught.value.kind == "ValueError"
    assert text in caught.value.text
