"""Telemetry on four ranks (cp 2, ep 2): what it costs, that it can be wrong and is seen to be, resume, off.

That load equals counts by hand at every layout stands with the parity tests (``assert_load``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fsdpturbo.telemetry.load_record import read_load
from tests.support.hand_counts import assert_load
from tests.support.reference_run import Run, build_trainer, forget_accelerate, merge_batches, run_reference, run_turbo
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import texts

WORLD, CP = 4, 2
NAMES = {"tokens_per_second", "memory_peak_gib", "experts/load_max_over_mean", "experts/router_entropy"}
# Operators whose result the host waits for on an accelerator.
SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "equal")


class Operators(TorchDispatchMode):
    """Counts collectives, and operators that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter = Counter()
        self.syncs: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            self.collectives[name] += 1
        if name.split("::")[-1].split(".")[0] in SYNCS or _by_mask(name, args):
            self.syncs[name] += 1
        return func(*args, **(kwargs or {}))


def _by_mask(name, args) -> bool:
    """Indexing by a bool tensor counts its rows on the host."""
    indices = args[1] if name.startswith("aten::index") and len(args) > 1 and isinstance(args[1], list) else []
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


def count_operators(run: Run, metrics: bool) -> tuple[Counter, Counter, list]:
    forget_accelerate()
    trainer = build_trainer(replace(run, gradients=False), turbo=True, fsdpturbo_metrics=metrics)
    with Operators() as operators:
        trainer.train()
    return operators.collectives, operators.syncs, trainer.state.log_history


def put_back(fault: str) -> list:
    """Faults that were thought of; returns what takes them out again."""
    from hf_fsdpturbo.telemetry import real_tokens

    wrong = {
        "recompute counts again": ("in_backward", lambda: False),
        "padding counts": ("_is_mask", lambda *_: False),
        "cp ranks take the batch for theirs": ("_place", lambda module: (1, 0, 1)),
    }
    name, function = wrong[fault]
    right = getattr(real_tokens, name)
    setattr(real_tokens, name, function)
    return [real_tokens, name, right]


FAULTS = ("recompute counts again", "padding counts", "cp ranks take the batch for theirs")


def interrupted(run: Run, folder: str) -> tuple:
    """Four steps with a checkpoint in the middle, then the last two again from there."""
    records = []
    for resume in (None, f"{folder}/checkpoint-2"):
        forget_accelerate()
        trainer = build_trainer(replace(run, gradients=False), turbo=True, output_dir=folder)
        trainer.train(resume)
        torch.distributed.barrier()
        records.append(read_load(folder))
    return records[0], records[1], trainer.state.log_history


def everything(run: Run, saved: Run, folder: str) -> dict:
    """Rank function: all that is looked at here, in one spawn."""
    found: dict = {"right": run_turbo(run)}
    for fault in FAULTS:
        place = put_back(fault)
        found[fault] = run_turbo(
            replace(run, args={**run.args, "max_steps": 1, "eval_strategy": "no"}, gradients=False)
        )
        setattr(*place)
    # two steps a window, and an evaluation in between
    spare = replace(run, args={**run.args, "logging_steps": 2, "max_steps": 4, "gradient_accumulation_steps": 1})
    found["on"], found["off"] = count_operators(spare, True), count_operators(spare, False)
    found["resumed"] = interrupted(saved, folder)
    return found


@pytest.fixture(scope="module")
def outcome(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    run = Run(
        tiny("qwen3_moe"),
        {"text": texts(24, seed=3)},
        args={
            "gradient_checkpointing": True,
            "gradient_accumulation_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 1,
        },
        turbo={"cp_size": CP, "ep_size": 2, "fused_linear_cross_entropy": "on"},
        eval_data={"text": texts(4, seed=4)},
    )
    saved = {"eval_strategy": "no", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    by_rank = run_ranks(everything, WORLD, run, replace(run, args={**run.args, **saved}), str(folder), timeout=200)
    batches = merge_batches([found["right"] for found in by_rank[::CP]])
    by_hand = run_plain(run_reference, replace(run, args={**run.args, "eval_strategy": "no"}), WORLD // CP, batches)
    return by_rank[0], by_hand


def test_evaluations_do_not_count(outcome):
    found, by_hand = outcome
    assert sum("eval_loss" in log for log in found["right"].log_history) == 3
    assert_load(found["right"], by_hand)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_put_back_are_seen(outcome, fault):
    found, by_hand = outcome
    with pytest.raises(AssertionError, match=r"MoE layer"):
        assert_load(found[fault], replace(by_hand, load=by_hand.load[:1]))


def test_one_collective_more_a_logging_step_and_no_wait_in_a_step(outcome):
    found, _ = outcome
    (on, waits, logs), (off, fewer_waits, plain) = found["on"], found["off"]
    lines = [log for log in logs if "loss" in log]
    assert len(lines) == 2
    assert on - off == Counter({"c10d::allreduce_": len(lines)})
    assert not off - on
    assert waits == fewer_waits
    assert sum(waits.values()) > 0
    assert all(log.keys() >= NAMES for log in lines)
    assert not any(log.keys() & NAMES for log in plain)
    assert [log["loss"] for log in lines] == [log["loss"] for log in plain if "loss" in log]


def test_a_resumed_run_continues_its_record(outcome):
    whole, resumed, logs = outcome[0]["resumed"]
    assert whole.steps == resumed.steps == [1, 2, 3, 4]
    assert [log["step"] for log in logs if "loss" in log] == [1, 2, 3, 4]
    for before, after in zip(whole.counts, resumed.counts, strict=True):
        assert (before == after).all()
    assert whole.losses == pytest.approx(resumed.losses, rel=1e-5)
