"""Telemetry on two ranks (cp 2, and ep 2): what it costs, that it can be wrong and is seen to be, resume, off.

That load equals counts by hand at every layout stands with the parity tests (``assert_load``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fsdpturbo.telemetry.load_record import read_load
from tests.support import trackers
from tests.support.hand_counts import assert_load
from tests.support.records import Record
from tests.support.reference_run import Run, build_trainer, forget_accelerate, run_reference, run_turbo
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import texts

WORLD = 2
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


def counted(run: Run) -> dict[str, Record]:
    """Rank function: as it is, and with each fault put back for a step."""
    found = {"right": run_turbo(run)}
    short = replace(run, args={**run.args, "max_steps": 1, "eval_strategy": "no"}, gradients=False)
    for fault in FAULTS:
        place = put_back(fault)
        found[fault] = run_turbo(short)
        setattr(*place)
    return found


def tracked(run: Run, folder: Path) -> dict[str, trackers.Points]:
    """Lines of a run with an evaluation, as the console, a writer and every tracker that is installed have them."""
    forget_accelerate()
    args = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **trackers.track(folder)}
    trainer = build_trainer(replace(run, gradients=False), turbo=True, output_dir=str(folder), **args)
    writer = trackers.Writer()
    trainer.add_callback(trackers.with_writer(writer))
    trainer.train()
    if trainer.args.process_index:
        return {"writer": writer.points}
    installed = {name: trackers.read_back(name, folder) for name in trackers.importable()}
    return {"console": trackers.console(trainer.state.log_history), "writer": writer.points, **installed}


def watched(run: Run, folder: str) -> tuple:
    """Rank function: on, off (two steps a window, an evaluation between), resumed, and what trackers got."""
    args = {"logging_steps": 2, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 3}
    counts = (count_operators(replace(run, args={**run.args, **args}), metrics) for metrics in (True, False))
    saved = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    resumed = interrupted(replace(run, args={**run.args, **saved}), folder)
    return (*counts, resumed, tracked(run, Path(folder) / "tracked"))


def run_of(tiny: Any, turbo: dict, **args: Any) -> Run:
    args |= {"gradient_checkpointing": True}
    return Run(
        tiny("qwen3_moe"),
        {"text": texts(24, seed=3)},
        args,
        {**turbo, "fused_linear_cross_entropy": "on"},
        eval_data={"text": texts(4, seed=4)},
    )


@pytest.fixture(scope="module")
def outcome(tiny):
    run = run_of(tiny, {"cp_size": 2}, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1)
    found = run_ranks(counted, WORLD, run, timeout=120)[0]
    plain = replace(run, args={**run.args, "eval_strategy": "no"})
    return found, run_plain(run_reference, plain, 1, found["right"].batches)  # both cp ranks have the same


@pytest.fixture(scope="module")
def on_off_resumed(tiny, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("resumed"))
    first, second = run_ranks(watched, WORLD, run_of(tiny, {"ep_size": 2}), folder, timeout=120)
    return (*first, second[3])


def one_process(run: Run) -> tuple[Record, Record]:
    """For one plain process: asked for, it is the same there; and its reference."""
    record = run_turbo(replace(run, turbo={"fsdpturbo_metrics": True}))
    return record, run_reference(run, 1, record.batches)


def test_one_process_is_counted_where_asked(tiny):
    record, by_hand = run_plain(one_process, run_of(tiny, {}))
    assert_load(record, by_hand)
    assert record.log_history[0].keys() >= NAMES


def test_evaluations_do_not_count(outcome):
    found, by_hand = outcome
    assert sum("eval_loss" in log for log in found["right"].log_history) == 3
    assert_load(found["right"], by_hand)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_put_back_are_seen(outcome, fault):
    found, by_hand = outcome
    with pytest.raises(AssertionError, match=r"MoE layer"):
        assert_load(found[fault], replace(by_hand, load=by_hand.load[:1]))


def test_one_collective_more_a_logging_step_and_no_wait_in_a_step(on_off_resumed):
    (on, waits, logs), (off, fewer_waits, plain), *_ = on_off_resumed
    lines = [log for log in logs if "loss" in log]
    assert len(lines) == 2
    assert on - off == Counter({"c10d::allreduce_": len(lines)})
    assert not off - on
    assert waits == fewer_waits
    assert sum(waits.values()) > 0
    assert all(log.keys() >= NAMES for log in lines)
    assert not any(log.keys() & NAMES for log in plain)
    assert [log["loss"] for log in lines] == [log["loss"] for log in plain if "loss" in log]


def test_a_resumed_run_continues_its_record(on_off_resumed):
    whole, resumed, logs = on_off_resumed[2]
    assert whole.steps == resumed.steps == [1, 2, 3, 4]
    assert [log["step"] for log in logs if "loss" in log] == [1, 2, 3, 4]
    for before, after in zip(whole.counts, resumed.counts, strict=True):
        assert (before == after).all()
    assert whole.losses == pytest.approx(resumed.losses, rel=1e-5)


@pytest.mark.parametrize("name", ["writer", *trackers.TRACKERS])
def test_trackers_get_what_the_console_gets(on_off_resumed, name):
    """Each value of each line, from rank 0 alone; tensorboard and trackio themselves where they are installed."""
    found, of_another_rank = on_off_resumed[3], on_off_resumed[4]
    if name not in found:
        pytest.skip(f"{name} is not installed: its callback's writer is checked by a stand-in only")
    shown = found["console"]
    names = {key for _, key in shown}
    assert names >= {*NAMES, "loss", "eval_loss", "straggler_rank", "grad_norm_expert"}
    # Transformers sends trackio no sums over the whole run, and its printer takes total_flos from who comes after.
    sums = {"train_runtime", "train_loss", "train_samples_per_second", "train_steps_per_second"}
    left_out = {"total_flos", *(sums if name == "trackio" else ())}
    wanted = {key: value for key, value in shown.items() if key[1] not in left_out}
    assert found[name].keys() - {(2, "total_flos")} == wanted.keys()
    for key, value in wanted.items():
        assert found[name][key] == pytest.approx(value, rel=1e-6), key  # tensorboard keeps float32
    assert of_another_rank == {"writer": {}}
