"""Resuming: 6 steps in one go against 3, a checkpoint, and 3 more, at the same topology and at others."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from tests.support.compare import distance
from tests.support.reference_run import Run, build_trainer, whole, whole_parameters
from tests.support.spawn import RankError, run_plain, run_ranks
from tests.support.tiny_models import save_tiny, texts

ARGS = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 3,
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "weight_decay": 0.01,
}


@dataclass
class Outcome:
    """What a run did; tensors on rank 0 only."""

    loaded: dict[str, Tensor] = field(default_factory=dict)  # weights and moments when training begins
    at_save: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # the same when a step was saved
    end: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    batches: list[Tensor] = field(default_factory=list)


def snapshot(trainer: Any) -> dict[str, Tensor]:
    """Whole weights and optimizer tensors by name; collective."""
    state = {f"weight {name}": tensor for name, tensor in whole_parameters(trainer.model).items()}
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    for parameter, values in trainer.optimizer.state.items():
        state |= {f"{key} {names[parameter]}": whole(value) for key, value in values.items()}
    return state


class Watch(TrainerCallback):
    def __init__(self, trainer: Any, outcome: Outcome) -> None:
        self.trainer, self.outcome = trainer, outcome

    def on_train_begin(self, args, state, control, **kwargs):
        self.outcome.loaded = snapshot(self.trainer)

    def on_save(self, args, state, control, **kwargs):
        self.outcome.at_save[state.global_step] = snapshot(self.trainer)


def train(run: Run, output_dir: str, resume: str | bool | None) -> Outcome:
    """Rank function: train to the end, from a checkpoint or from nothing."""
    trainer = build_trainer(run, turbo=True, output_dir=output_dir)
    outcome = Outcome()
    trainer.add_callback(Watch(trainer, outcome))
    trainer.train(resume_from_checkpoint=resume)
    outcome.end = snapshot(trainer)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    outcome.losses = {log["step"]: log["loss"] for log in logs}
    outcome.rates = {log["step"]: log["learning_rate"] for log in logs}
    outcome.batches = [batch["input_ids"] for batch in trainer.record.batches]
    if trainer.args.process_index:
        outcome.loaded, outcome.at_save, outcome.end = {}, {}, {}
    return outcome


@dataclass(frozen=True)
class Layout:
    """A topology and the accumulation that keeps the global batch at four micro-batches."""

    world: int
    turbo: dict[str, Any]

    def run(self, model: str, **changes: Any) -> Run:
        accumulation = 4 * self.turbo.get("cp_size", 1) // self.world
        args = {**ARGS, "gradient_accumulation_steps": accumulation, **changes.pop("args", {})}
        return Run(model=model, data={"text": texts(40)}, args=args, turbo=self.turbo, gradients=False, **changes)

    def train(self, run: Run, output_dir: Path, resume: str | bool | None = None) -> list[Outcome]:
        if self.world == 1:
            return [run_plain(train, run, str(output_dir), resume, timeout=90)]
        outcomes = run_ranks(train, self.world, run, str(output_dir), resume, timeout=90)
        return outcomes[:: self.turbo.get("cp_size", 1)]  # ranks that share a batch count once


EP2 = Layout(2, {"ep_size": 2})
EP4 = Layout(4, {"ep_size": 4})
EP1 = Layout(4, {"ep_size": 1})
EP2_EFSDP2 = Layout(4, {"ep_size": 2})
EP2_EDP2 = Layout(4, {"dist_config": {"ep_size": 2, "efsdp_size": 1}})
HSDP = Layout(4, {"ep_size": 2, "mp_replicate_size": 2})
CP2_EP2 = Layout(4, {"cp_size": 2, "ep_size": 2})
ONE = Layout(1, {})
OURS = {"optim_implementation": "fsdpturbo"}  # our AdamW; the others have torch's
EP2_OURS, EP4_OURS = Layout(2, {"ep_size": 2, **OURS}), Layout(4, {"ep_size": 4, **OURS})


def bit_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names that differ in any bit, or are on one side only."""
    return sorted(a.keys() ^ b.keys()) + [name for name in a if name in b and not torch.equal(a[name], b[name])]


def micro_batches(outcomes: list[Outcome]) -> list[list[int]]:
    return [batch.flatten().tolist() for group in zip(*(o.batches for o in outcomes), strict=True) for batch in group]


def check_continues(whole_run: list[Outcome], resumed: list[Outcome], saved_at: int, *, exact: bool = False) -> None:
    """The resumed run is the rest of the uninterrupted one."""
    first, second = whole_run[0], resumed[0]
    assert not bit_equal(first.at_save[saved_at], second.loaded)
    per_step = len(micro_batches(whole_run)) // 6
    assert micro_batches(resumed) == micro_batches(whole_run)[saved_at * per_step :]
    rest = [step for step in first.losses if step > saved_at]
    assert second.losses.keys() == first.losses.keys()  # the log goes on
    for step in rest:
        assert second.rates[step] == first.rates[step]
        assert second.losses[step] == pytest.approx(first.losses[step], rel=0 if exact else 1e-6)
    if exact:
        assert not bit_equal(first.end, second.end)
    else:
        far = {name: d for name, t in first.end.items() if (d := distance(second.end[name], t)) > 1e-5}
        assert not {name: d for name, d in far.items() if name.startswith("weight")}


SAME = {
    "ep2": (EP2, "sft"),
    "ep2 plain Trainer, our AdamW": (EP2_OURS, "plain"),
    "ep2 x efsdp2": (EP2_EFSDP2, "sft"),
    "cp2 x ep2": (CP2_EP2, "sft"),
}


@pytest.mark.parametrize("case", SAME)
def test_same_topology_is_bit_equal(tmp_path, case):
    """With dropout (where context parallelism allows it): the RNG of every rank is part of it."""
    layout, trainer = SAME[case]
    dropout = {} if "cp2" in case else {"attention_dropout": 0.1}
    model = save_tiny("qwen3_moe", tmp_path / "model", **dropout)
    run = layout.run(model, trainer=trainer)
    uninterrupted = layout.train(run, tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "checkpoint-6")
    resumed = layout.train(run, tmp_path / "a", resume=True)
    check_continues(uninterrupted, resumed, 3, exact=True)


MOVES = {
    "ep2 -> ep4": (EP2, EP4, {}),
    "ep4, our AdamW -> ep1": (EP4_OURS, EP1, {}),
    "ep2 x efsdp2 -> ep4, our AdamW": (EP2_EFSDP2, EP4_OURS, {}),
    "edp2 -> ep2 x efsdp2": (EP2_EDP2, EP2_EFSDP2, {}),
    "hsdp -> none": (HSDP, EP2_EFSDP2, {}),
    "cp2 x ep2 -> ep2 x efsdp2": (CP2_EP2, EP2_EFSDP2, {}),
    "input dim -> dim 0": (EP2_EFSDP2, EP2, {"num_experts": 6}),
}


@pytest.mark.parametrize("move", MOVES)
def test_other_topology(tmp_path, move):
    before, after, config = MOVES[move]
    model = save_tiny("qwen3_moe", tmp_path / "model", **config)
    uninterrupted = before.train(before.run(model), tmp_path / "a")
    resumed = after.train(after.run(model), tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-3"))
    check_continues(uninterrupted, resumed, 3)


def test_four_ranks_two_ranks_one_process(tmp_path):
    """Saved at 2 by four ranks, at 4 by two, finished by one unsharded process."""
    model = save_tiny("qwen3_5_moe", tmp_path / "model", layers=2)
    run4, run2, run1 = (layout.run(model, args={"save_steps": 2}) for layout in (EP2_EFSDP2, EP2, ONE))
    four = EP2_EFSDP2.train(run4, tmp_path / "four")
    two = EP2.train(run2, tmp_path / "two", resume=str(tmp_path / "four" / "checkpoint-2"))
    assert not bit_equal(four[0].at_save[2], two[0].loaded)
    one = ONE.train(run1, tmp_path / "one", resume=str(tmp_path / "two" / "checkpoint-4"))
    assert not bit_equal(two[0].at_save[4], one[0].loaded)
    assert one[0].losses[6] == pytest.approx(four[0].losses[6], rel=1e-6)
    far = {n: d for n, t in four[0].end.items() if n.startswith("weight") and (d := distance(one[0].end[n], t)) > 1e-5}
    assert not far, far


def test_the_checks_can_fail(tmp_path):
    """RNG files gone: other dropout. Moments of one expert changed: seen on load."""
    model = save_tiny("qwen3_moe", tmp_path / "model", attention_dropout=0.1)
    run = EP2.run(model)
    uninterrupted = EP2.train(run, tmp_path / "a")
    checkpoint = tmp_path / "a" / "checkpoint-3"
    for rank in range(2):
        # rank files swapped: same sizes, other checksums, other draws
        (checkpoint / f"rng_state_{rank}.pth").rename(checkpoint / f"swap{rank}")
    for rank in range(2):
        (checkpoint / f"swap{rank}").rename(checkpoint / f"rng_state_{1 - rank}.pth")
    with pytest.raises(RankError, match=r"rng_state_0.pth is not what was written"):
        EP2.train(run, tmp_path / "b", resume=str(checkpoint))
    unasked = Layout(2, {"ep_size": 2, "verify_checkpoint": False})
    resumed = unasked.train(unasked.run(model), tmp_path / "b", resume=str(checkpoint))
    assert not bit_equal(uninterrupted[0].at_save[3], resumed[0].loaded)
    with pytest.raises(AssertionError):
        check_continues(uninterrupted, resumed, 3, exact=True)
    resumed[0].loaded["exp_avg model.layers.0.mlp.experts.down_proj"][3] += 1
    assert bit_equal(uninterrupted[0].at_save[3], resumed[0].loaded)


def test_foreign_model_is_refused(tmp_path):
    model = save_tiny("qwen3_moe", tmp_path / "model")
    other = save_tiny("qwen3_moe", tmp_path / "other", num_experts=4)
    EP2.train(EP2.run(model, args={"max_steps": 3}), tmp_path / "a")
    with pytest.raises(RankError, match=r"topology.json.*num_experts=8.*num_experts=4"):
        EP2.train(EP2.run(other), tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-3"))
