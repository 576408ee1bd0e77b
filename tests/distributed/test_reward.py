"""Reward training equals one process of stock TRL, fresh `score` head included."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.compare import compare
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
from tests.support.reference_run import Run, whole
from tests.support.spawn import run_plain, run_ranks

ACCUMULATE = {"gradient_accumulation_steps": 2}
RECOMPUTE = {"gradient_checkpointing": True}
EP2, EP4 = {"ep_size": 2}, {"ep_size": 4}
HSDP = {"ep_size": 2, "mp_replicate_size": 2}

# layout -> (ranks, hf_fsdpturbo fields, run -> (family, training arguments))
LAYOUTS: dict[str, tuple[int, dict, dict[str, tuple[str, dict]]]] = {
    "ep2": (
        2,
        EP2,
        {
            "plain": ("qwen3_moe", {}),
            "accumulation_recompute": ("qwen3_moe", {**ACCUMULATE, **RECOMPUTE}),
            "centred": ("qwen3_moe", {"center_rewards_coefficient": 0.5}),
            "mixtral": ("mixtral", {}),
        },
    ),
    "ep4": (4, EP4, {"accumulation": ("qwen3_moe", ACCUMULATE)}),
    "ep2_efsdp2": (4, EP2, {"recompute": ("qwen3_moe", RECOMPUTE)}),
    "hsdp2_ep2": (4, HSDP, {"accumulation": ("qwen3_moe", ACCUMULATE)}),
}
CASES = [(layout, name) for layout, (_, _, runs) in LAYOUTS.items() for name in runs]


def two_columns(number: int, seed: int = 0) -> dict[str, list[str]]:
    return {name: column for name, column in pairs(number, seed).items() if name != "prompt"}


@pytest.fixture(scope="module")
def outcome(tiny: Callable[..., str]) -> Callable[[str], dict]:
    done: dict[str, dict] = {}

    def get(layout: str) -> dict:
        if layout not in done:
            world_size, turbo, runs = LAYOUTS[layout]
            jobs = {
                name: Preference(Run(tiny(family), two_columns(48), args, turbo, "reward"))
                for name, (family, args) in runs.items()
            }
            done[layout] = against_one_process(jobs, world_size, yardstick=True)
        return done[layout]

    return get


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_equals_one_process(outcome, layout, run):
    """Starting weights are compared too: the checkpoint has no head, both sides drew it from the same seed.

    Only the last token of a row is scored, so few tokens train the last router: ill-conditioned, hence the yardstick.
    """
    record, reference, yardstick = outcome(layout)[run]
    assert_load(record, reference)
    comparison = compare(record, reference, yardstick=yardstick)
    print(comparison.report)
    assert comparison, comparison.report
    assert len(record.gradients) == 3
    assert "score.weight" in record.start_weights
    assert record.start_weights["score.weight"].std() > 0.01


def evaluate(trainer: Any) -> list[dict[str, Any]]:
    """Hook after training."""
    trainer.evaluate()
    return list(trainer.state.log_history)


def logs_of(job: Preference) -> list[dict[str, Any]]:
    return turbo_ranks([job])[0].extra["after"]


def test_logged_names_and_values_are_stock(tiny):
    train, held_out = two_columns(24), two_columns(8, 9)
    args = {**ACCUMULATE, "max_length": 128}  # TRL leaves longer pairs out; an even number has no repeats to differ by
    run = Run(tiny("qwen3_moe"), train, args, EP2, "reward", after_train=evaluate, eval_data=held_out)
    ours = values(run_ranks(logs_of, 2, Preference(run), timeout=120)[0])
    stock = values(run_ranks(stock_ranks, 2, [Preference(run)], timeout=120)[0][0])
    assert [sorted(log) for log in ours] == [sorted(log) for log in stock]
    assert {"margin", "accuracy", "min_reward", "max_reward", "grad_norm"} <= set(ours[0])
    for log, other in zip(ours, stock, strict=True):
        for name, value in log.items():
            assert value == pytest.approx(other[name], rel=1e-4, abs=2e-6), name


def test_evaluation_counts_each_sample_once(tiny):
    """Seven pairs, two a rank: the last batch has 2 and 1 real ones. As one process with batches of four."""
    args = {"max_length": 128}  # TRL leaves longer pairs out
    run = Run(tiny("qwen3_moe"), two_columns(8), args, EP2, "reward", eval_data=two_columns(7, 9))
    plain = replace(run, args={**args, "per_device_eval_batch_size": 4})
    expected = run_plain(evaluated, Preference(plain), False)
    for found in run_ranks(evaluated, 2, Preference(run), True, timeout=90):
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    wrong = run_ranks(evaluated, 2, Preference(run), True, True, timeout=90)[0]
    assert wrong["eval_margin"] != pytest.approx(expected["eval_margin"], rel=1e-3), "the fault is not seen"


# The head


def head(path: str, turbo: dict[str, Any], fault: bool) -> torch.Tensor:
    """Rank function: the score head as a trainer starts with it, whole."""
    from hf_fsdpturbo.loading import seam
    from tests.support.reference_run import build_trainer

    if fault:
        seam.draw_heads_whole, seam.initialise_as_usual = (lambda model: None), (lambda model: None)
    run = Run(path, two_columns(8), {"seed": 11}, turbo, "reward")
    return whole(build_trainer(run, turbo=bool(turbo)).model.score.weight)


def test_head_is_equal_on_all_ranks_and_to_one_process(tiny, tmp_path):
    """With mp_replicate_size 2 the head exists twice; drawn shard by shard (the fault) it is another one."""
    from tests.support.tiny_models import save_tiny

    path = save_tiny("qwen3_moe", tmp_path)
    plain = run_plain(head, path, {}, False)
    for drawn in run_ranks(head, 4, path, HSDP, False, timeout=90):
        assert torch.equal(drawn, plain)


def shards_then_whole(path: str, fault: bool) -> tuple[float, torch.Tensor]:
    """Rank function: a head of more rows than ranks, so that every rank holds a part of it."""
    from transformers import AutoModelForSequenceClassification, set_seed

    from hf_fsdpturbo import FSDPTurboTrainingArguments
    from hf_fsdpturbo.loading import seam
    from hf_fsdpturbo.parallel_state import FSDPTurboParallelState, Topology
    from hf_fsdpturbo.parallelize.order import parallelize_model
    from tests.support.spawn import init_gloo

    init_gloo()
    args = FSDPTurboTrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, ep_size=2, report_to="none")
    state = FSDPTurboParallelState.initialize(Topology.resolve(2, ep_size=2), "cpu")
    if fault:
        seam.draw_heads_whole, seam.initialise_as_usual = (lambda model: None), (lambda model: None)
    set_seed(5)
    model = seam.load_sharded(
        path,
        AutoModelForSequenceClassification.from_pretrained,
        lambda model: parallelize_model(model, args, state)[0],
        device=torch.device("cpu"),
        num_labels=4,
        dtype=torch.float32,
    )
    return whole(model.score.weight)


def plain_head(path: str) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification, set_seed

    set_seed(5)
    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=4, dtype=torch.float32).score.weight


def test_each_rank_keeps_its_slice_of_one_draw(tiny):
    path = tiny("qwen3_moe")
    plain = plain_head(path)
    for drawn in run_ranks(shards_then_whole, 2, path, False):
        assert torch.equal(drawn, plain)
    for drawn in run_ranks(shards_then_whole, 2, path, True):
        assert not torch.equal(drawn, plain), "the fault is not seen"


def scores_in_bf16(path: str) -> tuple[torch.dtype, torch.dtype]:
    """Rank function: dtype of the scores and of the computation in a bf16 run."""
    from tests.support.reference_run import build_trainer

    trainer = build_trainer(Run(path, two_columns(8), {"bf16": True}, EP2, "reward"), turbo=True)
    seen = []
    trainer.model.score.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    batch = next(iter(trainer.get_train_dataloader()))
    return trainer.model(**batch).logits.dtype, seen[0]


def test_scores_of_a_bf16_run_are_float32(tiny):
    assert run_ranks(scores_in_bf16, 2, tiny("qwen3_moe"))[0] == (torch.float32, torch.bfloat16)
