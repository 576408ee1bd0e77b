"""S11 and C9: a loss that is not finite on one rank, and SIGTERM at different moments; two ranks, one spawn each."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.reference_run import Run, build_trainer, forget_accelerate, whole
from tests.support.spawn import run_ranks
from tests.support.tiny_models import texts

STEPS = 3


def poison(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """Rank 1's hidden states are NaN in the second micro-batch of step 2; returns the state after each step."""
    from transformers import TrainerCallback

    passes = {"micro-batches": 0}
    after: list[dict[str, torch.Tensor]] = []

    def spoil(module, args, output):
        if not module.training:
            return output
        passes["micro-batches"] += 1
        return output * float("nan") if passes["micro-batches"] == 4 and os.environ["RANK"] == "1" else output

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            state = {name: whole(parameter) for name, parameter in trainer.model.named_parameters()}
            moments = {
                f"{name} {key}": whole(value)
                for name, parameter in trainer.model.named_parameters()
                for key, value in trainer.optimizer.state.get(parameter, {}).items()
            }
            after.append({**state, **moments})

    trainer.model.model.norm.register_forward_hook(spoil)
    trainer.add_callback(Keep())
    return after


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def are_finite(state: dict[str, torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in state.values())


def poisoned(run: Run, folder: Path) -> dict[str, Any]:
    """Rank function: what each mode says and does."""
    found = {}
    for mode in ("warn", "skip", "stop"):
        forget_accelerate()
        run = replace(run, turbo={**run.turbo, "on_nonfinite": mode})
        trainer = build_trainer(run, True, output_dir=folder / mode)
        after, said, error = poison(trainer), io.StringIO(), ""
        with contextlib.redirect_stdout(said):
            try:
                trainer.train()
            except ValueError as raised:
                error = str(raised)
        found[mode] = {
            "finite": [are_finite(state) for state in after],
            "same": [same(one, other) for one, other in zip(after, after[1:], strict=False)],
            "said": [line for line in said.getvalue().splitlines() if "step 2" in line],
            "error": error,
        }
    return found


def test_s11_the_first_value_that_is_not_finite_is_named(tiny, tmp_path):
    args = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1}
    run = Run(tiny("qwen3_moe"), {"text": texts(16, seed=3)}, args, {"ep_size": 2}, gradients=False)
    ranks = run_ranks(poisoned, 2, run, tmp_path, timeout=90)
    for found in ranks:
        assert found["warn"]["finite"] == [True, False, False], "the fault did not reach the weights"
        assert found["skip"]["finite"] == [True, True, True]
        assert found["skip"]["same"] == [True, False], "step 2 changed weights or moments, or step 3 did not"
        assert found["stop"]["finite"] == [True]
        assert "step 2: the loss of micro-batch 1 on rank 1 is not finite" in found["stop"]["error"]
        assert "dense, expert" in found["stop"]["error"]
    first, second = ranks
    for mode in ("warn", "skip"):
        (line,) = first[mode]["said"]
        assert "step 2: the loss of micro-batch 1 on rank 1 is not finite; the gradient norm" in line
        assert f"on_nonfinite={mode}" in line
        assert second[mode]["said"] == [], "said by one rank"
    records = {
        (mode, step): json.loads((tmp_path / mode / f"checkpoint-{step}" / "COMPLETE.json").read_text())
        for mode, step in (("warn", 1), ("warn", 2), ("skip", 2), ("stop", 1))
    }
    assert {key: record["weights_finite"] for key, record in records.items()} == {
        ("warn", 1): True,
        ("warn", 2): False,
        ("skip", 2): True,
        ("stop", 1): True,
    }
    assert "model.embed_tokens.weight" in records["warn", 2]["weights_not_finite"]
    assert not (tmp_path / "stop" / "checkpoint-2").exists()


# SIGTERM


def signalled(run: Run, folder: Path, moments: dict[str, dict[int, int]]) -> dict[str, int]:
    """Rank function: the step at which this rank's training ended, in runs where ranks get SIGTERM at given steps."""
    from transformers import TrainerCallback

    from hf_fsdpturbo import watcher

    watcher.POLL = 0.1
    ended = {}
    for name, steps in moments.items():
        forget_accelerate()
        trainer = build_trainer(run, True, output_dir=folder / name)
        mine = steps.get(trainer.args.process_index)

        class Signal(TrainerCallback):
            def on_step_begin(self, args, state, control, mine=mine, **kwargs):
                time.sleep(0.01)
                if state.global_step == mine:
                    os.kill(os.getpid(), signal.SIGTERM)

        trainer.add_callback(Signal())
        trainer.train()
        ended[name] = trainer.state.global_step
    return ended


def test_c9_all_ranks_save_the_same_step_whichever_was_signalled(tiny, tmp_path):
    moments = {"one": {1: 2}, "apart": {0: 3, 1: 5}, "other": {0: 4}}
    args = {"max_steps": 400, "enable_jit_checkpoint": True, "save_strategy": "steps", "save_steps": 1000}
    run = Run(tiny("qwen3_moe"), {"text": texts(16, seed=3)}, args, {"ep_size": 2}, gradients=False)
    first, second = run_ranks(signalled, 2, run, tmp_path, moments, timeout=90)
    assert first == second
    for name, steps in moments.items():
        assert min(steps.values()) < first[name] < 400, name
        assert [path.name for path in sorted((tmp_path / name).glob("checkpoint-*"))] == [f"checkpoint-{first[name]}"]
        assert (tmp_path / name / f"checkpoint-{first[name]}" / "COMPLETE.json").is_file()


def test_c9_a_rank_that_ends_training_answers_one_that_waits_at_the_last_step(monkeypatch):
    """Else the other waits for its answer for ever, outside of any collective: nothing would end it."""
    from types import SimpleNamespace

    from hf_fsdpturbo.trainer import sigterm

    kept: dict[str, str] = {}
    watch = SimpleNamespace(store=SimpleNamespace(set=kept.__setitem__), each_poll=[])
    monkeypatch.setattr(sigterm, "this_rank", lambda: watch)
    keys = []
    for _ in range(2):  # what was said in one run is not heard in the next
        stop = sigterm.AgreedStop(None)
        stop.on_train_begin(None, SimpleNamespace(global_step=0), None)
        stop.on_step_end(None, SimpleNamespace(global_step=4), None)
        stop.on_train_end(None, None, None)
        keys.append(f"{stop.key}/0")
    assert kept == dict.fromkeys(keys, "5")
    assert len(kept) == 2


@pytest.mark.parametrize("answers", [(3, 3), (3, 4), (4, 3)])
def test_c9_the_step_is_the_largest_that_any_rank_will_look_at(monkeypatch, answers):
    """Ranks whose main threads look at the end of steps 3 and 4: none goes past its own before it knows."""
    from types import SimpleNamespace

    from hf_fsdpturbo.trainer import sigterm

    kept: dict[str, bytes] = {}
    store = SimpleNamespace(
        set=lambda key, value: kept.__setitem__(key, str(value).encode()),
        check=lambda keys: all(key in kept for key in keys),
        multi_get=lambda keys: [kept[key] for key in keys],
    )
    monkeypatch.setattr(sigterm, "world_size", lambda: 2)
    monkeypatch.setattr(sigterm, "this_rank", lambda: SimpleNamespace(store=store))
    saved: list[tuple[int, int]] = []
    for rank, looks in enumerate(answers):
        monkeypatch.setattr(sigterm, "rank", lambda rank=rank: rank)
        stop = sigterm.AgreedStop(None)
        stop.next_end, stop.signalled = looks, rank == 0
        stop._look(store)
    for rank, looks in enumerate(answers):
        monkeypatch.setattr(sigterm, "rank", lambda rank=rank: rank)
        stop = sigterm.AgreedStop(
            SimpleNamespace(model=None, _save_checkpoint=lambda *a, **k: saved.append((rank, step)))  # noqa: B023
        )
        stop.answered = looks
        for step in range(looks, 6):
            control = SimpleNamespace(should_training_stop=False, should_save=True)
            stop.on_step_end(None, SimpleNamespace(global_step=step), control)
            if control.should_training_stop:
                break
    assert saved == [(0, max(answers)), (1, max(answers))]
