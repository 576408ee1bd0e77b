"""Issue 18: balancing by a correction bias, routers' own rate, frozen routers; four ranks, one spawn.

The reference is TRL's trainer in one process, which counts what its routers choose (``HandCounts``), moves the biases
in a loop over Python numbers and splits its optimizer's groups by hand.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compare import TOLERANCE, compare, distance
from tests.support.hand_counts import HandCounts
from tests.support.records import Record, Run
from tests.support.reference_run import (
    build_trainer,
    forget_accelerate,
    merge_batches,
    run_reference,
    run_turbo,
    whole_parameters,
)
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import texts

RATE, SCALE, STEPS = 0.01, 0.25, 3
BIAS = "e_score_correction_bias"
BALANCED = {"router_bias_update_rate": RATE, "router_lr_scale": SCALE}


def biases_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith(BIAS)}


def rates(trainer: Any) -> list[tuple[float, float]]:
    """At each step the rate of the routers and of the others."""
    from transformers import TrainerCallback

    found: list[tuple[float, float]] = []

    class Rates(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            gates = {id(p) for n, p in trainer.model.named_parameters() if n.endswith("mlp.gate.weight")}
            groups = trainer.optimizer.param_groups
            by_kind = {id(p) in gates: group["lr"] for group in groups for p in group["params"]}
            found.append((by_kind[True], by_kind[False]))

    trainer.add_callback(Rates())
    return found


def by_hand(trainer: Any) -> HandCounts | None:
    """``before_train``: gives the stock trainer what ours does by its settings; ours it leaves alone."""
    trainer.rates = rates(trainer)
    if hasattr(trainer, "parallel_state"):
        return None
    from transformers import TrainerCallback

    counts = HandCounts(trainer.model)
    make = trainer.create_optimizer

    def with_groups(*args: Any) -> Any:
        optimizer = make(*args)
        gates = {id(p) for n, p in trainer.model.named_parameters() if n.endswith("mlp.gate.weight")}
        (decayed,) = (
            group for group in optimizer.param_groups if id(group["params"][0]) in gates or group["weight_decay"]
        )
        own = [p for p in decayed["params"] if id(p) in gates]
        decayed["params"] = [p for p in decayed["params"] if id(p) not in gates]
        optimizer.add_param_group(
            {"params": own, "lr": SCALE * decayed["lr"], "weight_decay": decayed["weight_decay"]}
        )
        return optimizer

    class Balance(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            counts.end_step()
            for load, bias in zip(counts.steps[-1], biases(trainer.model), strict=True):
                mean = sum(load.tolist()) / len(load)
                for expert, tokens in enumerate(load.tolist()):
                    bias[expert] += RATE if tokens < mean else -RATE if tokens > mean else 0.0

    def biases(model: Any) -> list[torch.Tensor]:
        return [buffer for name, buffer in model.named_buffers() if name.endswith(BIAS)]

    trainer.create_optimizer = with_groups
    trainer.add_callback(Balance())
    return None


def afterwards(trainer: Any) -> dict[str, Any]:
    """``after_train``."""
    folder = os.path.join(trainer.args.output_dir, "saved")
    trainer.save_model(folder)
    return {"biases": biases_of(trainer.model), "rates": trainer.rates, "folder": folder}


def spoilt(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """``before_train``: rank 1 has no finite loss in its second step; returns biases (and weights) after each step."""
    from transformers import TrainerCallback

    by_hand(trainer)
    after: list[dict[str, torch.Tensor]] = []
    if not hasattr(trainer, "parallel_state"):
        return after
    passes = [0]

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        passes[0] += module.training
        return output * float("nan") if passes[0] == 2 and os.environ["RANK"] == "1" else output

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            after.append({**biases_of(trainer.model), **whole_parameters(trainer.model)})

    trainer.model.model.norm.register_forward_hook(spoil)
    trainer.add_callback(Keep())
    return after


def only_biases(trainer: Any) -> dict[str, torch.Tensor]:
    """``after_train``."""
    return biases_of(trainer.model)


def resumed(run: Run, checkpoint: str) -> Record:
    forget_accelerate()
    trainer = build_trainer(run, turbo=True)
    by_hand(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    record = trainer.finish_record()
    record.extra["after"] = afterwards(trainer)
    return record


def refused(run: Run) -> list[str]:
    """What each setting that cannot work says."""
    said = []
    for turbo in ({"router_bias_update_rate": 0.1}, {"freeze_routers": True, "router_lr_scale": 0.5}):
        forget_accelerate()
        try:
            build_trainer(replace(run, turbo={"ep_size": 2, **turbo}), turbo=True).train()
        except ValueError as error:
            said.append(str(error))
    return said


def shards_of_a_bias() -> list[torch.Tensor]:
    """A bias that FSDP has sharded, as a family has it whose bias is a frozen parameter, after one update."""
    from torch import distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from hf_fsdpturbo.routers.bias_update import BiasUpdate

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    moved = []
    for shape, dtype in (((6,), torch.float32), ((1, 6), torch.float32), ((6,), torch.bfloat16)):
        block = nn.Module()
        block.experts = nn.Module()
        whole = torch.full(shape, 256.0, dtype=dtype)
        block.expert_bias = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]), requires_grad=False)
        model = nn.ModuleDict({"mlp": block})
        update = BiasUpdate(model, {"mlp.experts": 6}, 0.25)
        update.begin()
        for _ in range(4):  # a quarter is lost in bfloat16 beside 256, four of them are not
            update.apply({"mlp.experts": torch.tensor([3, 1, 2, 2, 0, 4])})
        moved.append(block.expert_bias.full_tensor().flatten().float())
    return moved


def train_all(balanced: Run, frozen: Run, skipping: Run) -> dict[str, Any]:
    """Rank function."""
    found: dict[str, Any] = {"balanced": run_turbo(balanced), "frozen": run_turbo(frozen)}
    found["skipping"] = run_turbo(skipping)
    found["refused"] = refused(frozen)
    found["moved"] = shards_of_a_bias()
    return found


def alone(jobs: list[tuple[Run, int, Any]], resuming: Run, checkpoint: str) -> tuple[list[Record], Record, str]:
    """One plain process: the references; our trainer that goes on from a checkpoint, and refuses another rate."""
    found = [run_reference(*job) for job in jobs]
    record, said = resumed(resuming, checkpoint), ""
    try:
        resumed(replace(resuming, turbo={**resuming.turbo, "router_lr_scale": 0.5}), checkpoint)
    except ValueError as error:
        said = str(error)
    return found, record, said


def frozen_gates(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.requires_grad_(False)


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("routers")
    path = tiny("deepseek_v3", layers=3, favour={0: 0.03, 1: 0.02})
    args = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.1,
        "save_strategy": "steps",
        "save_steps": 2,
        "output_dir": str(folder / "balanced"),
    }
    data = {"text": texts(64, seed=4, longest=80)}
    more = {"before_train": by_hand, "after_train": afterwards, "gradients": False}
    balanced = Run(path, data, args, {"ep_size": 2, **BALANCED}, **more)
    frozen = Run(tiny("qwen3_moe"), data, {"max_steps": 2}, {"ep_size": 2, "freeze_routers": True})
    short = {"max_steps": STEPS, "weight_decay": 0.1}
    skipping = replace(
        balanced, args=short, turbo={**balanced.turbo, "on_nonfinite": "skip"}, before_train=spoilt,
        after_train=only_biases,
    )  # fmt: skip
    by_rank = run_ranks(train_all, 4, balanced, frozen, skipping, timeout=120)
    reference = replace(balanced, args={**args, "save_strategy": "no", "output_dir": str(folder / "reference")})
    batches = merge_batches([found["balanced"] for found in by_rank])
    frozen_batches = merge_batches([found["frozen"] for found in by_rank])
    seen = merge_batches([found["skipping"] for found in by_rank])
    without = replace(skipping, args={**short, "max_steps": STEPS - 1})  # the same, never having seen the second step
    held = replace(frozen, as_object=True, prepare=frozen_gates)
    one = {**args, "gradient_accumulation_steps": 8, "save_strategy": "no", "output_dir": str(folder / "resumed")}
    plain, again, other_rate = run_plain(
        alone,
        [(reference, 4, batches), (held, 4, frozen_batches), (without, 4, [*seen[:4], *seen[8:]])],
        replace(balanced, args=one, turbo=BALANCED),
        str(folder / "balanced" / "checkpoint-2"),
        timeout=120,
    )
    return {
        "ranks": by_rank,
        "reference": plain[0],
        "frozen reference": plain[1],
        "without": plain[2],
        "resumed": again,
        "other rate": other_rate,
    }


def test_weights_and_biases_equal_those_of_one_process(runs):
    sharded, reference = runs["ranks"][0]["balanced"], runs["reference"]
    same = compare(sharded, reference, what=("losses", "grad_norms", "weights"))
    assert same, same.report
    expected = reference.extra["after"]["biases"]
    assert len(expected) == 2
    for name, bias in sharded.extra["after"]["biases"].items():
        assert distance(bias, expected[name]) < TOLERANCE, name


def test_all_ranks_have_the_same_biases_bit_for_bit(runs):
    by_rank = [found["balanced"].extra["after"]["biases"] for found in runs["ranks"]]
    for name, bias in by_rank[0].items():
        assert all(torch.equal(other[name], bias) for other in by_rank), name


def test_biases_and_rates_go_on_in_a_resumed_run(runs):
    """At another layout: of our trainer in one process, which balances too."""
    through, again = runs["ranks"][0]["balanced"], runs["resumed"]
    for name, bias in through.extra["after"]["biases"].items():
        assert torch.equal(again.extra["after"]["biases"][name], bias), name
    assert again.extra["after"]["rates"] == through.extra["after"]["rates"][2:]
    same = compare(again, through, what=("weights",))
    assert same, same.report


def test_a_step_that_is_left_out_moves_no_bias(runs):
    """As in one process that never saw its micro-batches: neither its update, nor its load in the next one."""
    reference = runs["without"]
    for found in runs["ranks"]:
        first, skipped, last = found["skipping"].extra["before"]
        assert all(torch.equal(first[name], skipped[name]) for name in first)
        moved = [name for name in first if not torch.equal(skipped[name], last[name])]
        assert sum(name.endswith(BIAS) for name in moved) == 2, "the next step moves them again"
        for name, bias in found["skipping"].extra["after"].items():
            assert distance(bias, reference.extra["after"][name]) < TOLERANCE, name
    same = compare(runs["ranks"][0]["skipping"], reference, what=("weights",))
    assert same, same.report


def test_the_ratio_of_rates_stays_through_the_schedule(runs):
    found = runs["ranks"][0]["balanced"].extra["after"]["rates"]
    assert len({own for own, _ in found}) == STEPS, "the schedule moves"
    for own, others in found:
        assert own == pytest.approx(SCALE * others)
    logged = [log["learning_rate"] for log in runs["ranks"][0]["balanced"].log_history if "learning_rate" in log]
    assert logged == pytest.approx([others for _, others in found]), "what is logged is the others' rate"


def test_the_export_has_the_biases(runs):
    from safetensors.torch import load_file

    after = runs["ranks"][0]["balanced"].extra["after"]
    saved = load_file(Path(after["folder"]) / "model.safetensors")
    for name, bias in after["biases"].items():
        assert torch.equal(saved[name], bias), name


def test_frozen_routers_stay_and_the_others_train_as_beside_frozen_ones(runs):
    sharded, reference = runs["ranks"][0]["frozen"], runs["frozen reference"]
    same = compare(sharded, reference)
    assert same, same.report
    gates = [name for name in sharded.weights if name.endswith("mlp.gate.weight")]
    assert gates
    for name in gates:
        assert torch.equal(sharded.weights[name], sharded.start_weights[name]), name
        assert name not in sharded.trainable


def test_what_cannot_work_is_said_on_every_rank(runs):
    for found in runs["ranks"]:
        no_bias, nothing_trains = found["refused"]
        assert "router_bias_update_rate=0.1: qwen3_moe has no correction bias" in no_bias
        assert "router_lr_scale=0.5: no parameter of a router trains" in nothing_trains
    assert "router_lr_scale=0.5, but the checkpoint was trained with 0.25" in runs["other rate"]


def test_a_bias_that_is_a_sharded_parameter_or_in_half_precision(runs):
    expected = 256.0 + torch.tensor([-1.0, 1.0, 0.0, 0.0, 1.0, -1.0])
    for found in runs["ranks"]:
        single, nested, half = found["moved"]
        assert torch.equal(single, expected)
        assert torch.equal(nested, expected)
        assert torch.equal(half, expected.bfloat16().float())
