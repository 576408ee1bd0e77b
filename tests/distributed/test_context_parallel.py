"""Context parallelism through the trainer: losses, norms, gradients and weights of three steps equal one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.support.compare import compare
from tests.support.hand_counts import assert_load
from tests.support.reference_run import Run, run_turbo, sharded_and_reference
from tests.support.spawn import RankError, run_plain, run_ranks
from tests.support.tiny_models import texts

# name -> (ranks, cp_size, hf_fsdpturbo fields)
LAYOUTS = {
    "cp2": (2, 2, {}),
    "cp2 ep2": (4, 2, {"ep_size": 2}),
    "cp4": (4, 4, {}),
    "cp2 ep2 efsdp2": (8, 2, {"ep_size": 2}),
    "cp2 hsdp": (4, 2, {"mp_replicate_size": 2}),
    "cp2 ep2 edp2": (8, 2, {"dist_config": {"ep_size": 2, "efsdp_size": 1}}),
}
ARGS = {
    "padded": {},
    "packed": {"packing": True, "packing_strategy": "bfd", "max_length": 40},
    "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1},
    "checkpointed": {"gradient_checkpointing": True},
    "padding-free": {"padding_free": True, "max_length": None},
}


def runs_of(path, layout, which=("padded", "packed"), samples=24, **more):
    _, cp_size, turbo = LAYOUTS[layout]
    run = Run(path, {"text": texts(samples, seed=3)}, turbo={"cp_size": cp_size, **turbo}, **more)
    return {name: replace(run, args={**run.args, **ARGS[name]}) for name in which}


def shard_the_loss(trainer):
    trainer.cp_sharded_loss = True


def with_our_head(run):
    """``auto`` leaves TRL's on CPU."""
    return replace(run, turbo={**run.turbo, "fused_linear_cross_entropy": "on"})


def check(results):
    for name, (record, reference, yardstick) in results.items():
        comparison = compare(record, reference, yardstick=yardstick)
        print(f"{name}: loss {record.losses[0]:.4f}, worst {comparison.worst():.1e}")
        assert comparison, f"{name}: {comparison.report}"
        assert 5 < record.losses[0] < 7  # ln 384 = 5.95: it trains on something
        assert_load(record, reference)  # each cp rank counts its own slice, once


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sft_equals_one_process(tiny, layout):
    world, cp_size, _ = LAYOUTS[layout]
    which = tuple(ARGS) if layout == "cp2 ep2" else ("padded", "packed")
    runs = runs_of(tiny("qwen3_moe"), layout, which)
    runs["padded"] = with_our_head(runs["padded"])
    runs |= {"checkpointed": with_our_head(runs["checkpointed"])} if "checkpointed" in runs else {}
    yardstick = {"padding-free"} & set(runs)  # 9e-6: one row of all samples, so few tokens for some experts
    results = sharded_and_reference(runs, world, cp_size=cp_size, timeout=240, yardstick=yardstick)
    check(results)
    ranks = results["padded"][0].extra["ranks"]
    for number, record in enumerate(ranks):  # a cp group shares its batches, others have different ones
        for place, theirs in enumerate(ranks):
            pairs = zip(record.batches, theirs.batches, strict=True)
            same = all(torch.equal(mine["input_ids"], other["input_ids"]) for mine, other in pairs)
            assert same == (number // cp_size == place // cp_size), (number, place)
    for record, reference, _ in results.values():
        tokens = [[log.get("num_tokens") for log in r.log_history if "loss" in log] for r in (record, reference)]
        assert tokens[0] == tokens[1]


def test_lm_head_on_the_slice_changes_nothing(tiny):
    """cp_sharded_loss: the same as one process, logged metrics included."""
    which = ("padded", "packed", "accumulated")
    runs = runs_of(tiny("qwen3_moe"), "cp4", which, before_train=shard_the_loss)
    # Only TRL's head rounds as the reference does. A first AdamW step goes by the signs of gradients, also next to
    # zero: at 1e-3 the gradients of attention's norms are 1.1e-5 off after it, with first gradients 2e-6 off at most.
    for name in ("padded", "accumulated"):
        ours = with_our_head(runs[name])
        runs[f"{name}, our head"] = replace(ours, args={**ours.args, "learning_rate": 1e-4})
    results = sharded_and_reference(runs, 4, cp_size=4, timeout=180)
    check(results)
    for name in ("padded, our head", "accumulated, our head"):
        assert compare(*results[name][:2]).worst("gradient 1 ") < 3e-6
    for record, reference, _ in results.values():
        for mine, theirs in zip(record.log_history, reference.log_history, strict=True):
            for name in ("entropy", "mean_token_accuracy", "aux_loss", "num_tokens"):
                if name in theirs:
                    assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name


@pytest.mark.parametrize(
    ("family", "config", "kwargs"),
    [
        ("qwen3_5_moe", {"layers": 4}, {}),
        ("gpt_oss", {"sliding_window": 8}, {"attn_implementation": "eager"}),
    ],
)
def test_other_families_equal_one_process(tiny, family, config, kwargs):
    world, cp_size, _ = LAYOUTS["cp2 ep2"]
    runs = runs_of(tiny(family, **config), "cp2 ep2", ("padded", "checkpointed"), model_kwargs=kwargs)
    check(sharded_and_reference(runs, world, cp_size=cp_size, timeout=180, yardstick=tuple(runs)))


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss"])
def test_bf16_compute_stays_near(tiny, family):
    """Mixed dtypes on the way (float32 decay, routers, reduction): bf16 rounding away from one float32 process."""
    kwargs = {"attn_implementation": "eager"} if family == "gpt_oss" else {}
    run = runs_of(tiny(family, layers=2), "cp2", ("padded",), model_kwargs=kwargs, gradients=False)["padded"]
    run = replace(run, turbo={**run.turbo, "bf16": True})
    record, reference, _ = sharded_and_reference({"bf16": run}, 2, cp_size=2)["bf16"]
    assert record.losses == pytest.approx(reference.losses, rel=5e-3)
    assert record.losses != reference.losses
    assert record.grad_norms == pytest.approx(reference.grad_norms, rel=5e-2)


# B3 of the reference implementation: gradients never averaged over cp.


def _without_cp_in_the_meshes(state_class):
    """The fault: dense weights sharded over data ranks only, experts over efsdp only; each cp rank on its own."""
    from torch.distributed.device_mesh import init_device_mesh

    def dense(self):
        sizes = (self.topology.dp_size, self.topology.cp_size)
        return init_device_mesh(self.device_type, sizes, mesh_dim_names=("fsdp", "other"))["fsdp"]

    state_class._dense_mesh = dense
    state_class._expert_fsdp_mesh = lambda self: self.expert_mesh["efsdp"]


def run_with_b3(run, scale_check):
    """Rank function: training with the fault put back, start-up check on or off."""
    import hf_fsdpturbo.parallelize.build as build
    from hf_fsdpturbo.parallel_state import FSDPTurboParallelState

    _without_cp_in_the_meshes(FSDPTurboParallelState)
    if not scale_check:
        build.check_gradient_scale = lambda *args: None
    return run_turbo(run)


def test_b3_is_seen(tiny):
    runs = runs_of(tiny("qwen3_moe"), "cp2 ep2", ("padded",))
    good, reference, _ = sharded_and_reference(runs, 4, cp_size=2)["padded"]
    assert compare(good, reference)
    faulty = run_ranks(run_with_b3, 4, runs["padded"], False, timeout=120)[0]
    comparison = compare(faulty, reference)
    print(comparison.report)
    assert not comparison
    assert comparison.worst("gradient") > 0.1
    with pytest.raises(RankError, match="Gradient scale check failed"):
        run_ranks(run_with_b3, 4, runs["padded"], True, timeout=120)


# Replicas: every rank that should hold the same shard holds the same bits.


def replica_differences(trainer):
    """Names of parameters whose local shards differ between replicas (ranks along a Replicate axis of their mesh)."""
    from torch.distributed.tensor import DTensor

    different, compared = [], 0
    for name, parameter in trainer.model.named_parameters():
        assert isinstance(parameter, DTensor), name
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate() or mesh.size(axis) == 1:
                continue
            group, local = mesh.get_group(axis), parameter.to_local().detach().contiguous()
            others = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(others, local, group=group)
            compared += 1
            different += [name for other in others if not torch.equal(other, local)]
    return different, compared


@pytest.mark.parametrize("layout", ["cp2 hsdp", "cp2 ep2 edp2"])
def test_replicas_stay_bit_identical(tiny, layout):
    world, _, _ = LAYOUTS[layout]
    more = {"args": {"max_steps": 20}, "after_train": replica_differences, "gradients": False}
    run = runs_of(tiny("qwen3_moe"), layout, ("padded",), **more)["padded"]
    for record in run_ranks(run_turbo, world, run, timeout=240):
        different, compared = record.extra["after"]
        assert compared > 0
        assert not different
        assert len(record.losses) == 20


# Evaluation: every sample once.


def _tokens_and_hits(prediction):
    """compute_metrics: which samples arrived (by their labels) and what was predicted there."""
    import numpy as np

    real = prediction.label_ids != -100
    return {
        "samples": len(prediction.label_ids),
        "tokens": int(real.sum()),
        "label_sum": int(np.where(real, prediction.label_ids, 0).sum()),
        "prediction_sum": int(np.where(real, prediction.predictions, 0).sum()),
    }


def _best_token(logits, labels):
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def predict(trainer):
    """Evaluate and predict; rows and losses as they come back."""
    output = trainer.predict(trainer.eval_dataset)
    rows = [[int(t) for t in row if t != -100] for row in output.label_ids]
    return trainer.evaluate(), output.metrics, rows, trainer.state.num_input_tokens_seen


def run_and_predict(run, turbo):
    from tests.support.reference_run import build_trainer

    trainer = build_trainer(run, turbo)
    trainer.train()
    return predict(trainer)


@pytest.mark.parametrize("samples", [5, 8])
def test_evaluation_counts_each_sample_once(tiny, samples):
    run = Run(
        tiny("qwen3_moe"),
        {"text": texts(8, seed=1)},
        args={"max_steps": 1, "per_device_train_batch_size": 4, "include_num_input_tokens_seen": "non_padding",
              "per_device_eval_batch_size": 1, "learning_rate": 0.0},
        turbo={"cp_size": 2, "ep_size": 2},
        trainer="plain",
        eval_data={"text": texts(samples, seed=2)},
        trainer_kwargs={"compute_metrics": _tokens_and_hits, "preprocess_logits_for_metrics": _best_token},
    )  # fmt: skip
    one = replace(run, args={**run.args, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 2})
    expected = run_plain(run_and_predict, one, False)
    for evaluated, predicted, rows, seen in run_ranks(run_and_predict, 4, run, True, timeout=120):
        assert seen == expected[3]
        assert rows == expected[2]
        assert len(rows) == samples
        for name in ("samples", "tokens", "label_sum"):
            assert evaluated[f"eval_{name}"] == expected[0][f"eval_{name}"]
            assert predicted[f"test_{name}"] == expected[1][f"test_{name}"]
        assert evaluated["eval_loss"] == pytest.approx(expected[0]["eval_loss"], rel=1e-5)
        assert predicted["test_loss"] == pytest.approx(expected[1]["test_loss"], rel=1e-5)
