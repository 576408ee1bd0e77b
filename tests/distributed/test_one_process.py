"""One process under our trainers with our expert block, against plain TRL: loss, gradients, norm, weights, resume."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.adapter_runs import lora
from tests.support.compare import compare, distance
from tests.support.preference_runs import pairs
from tests.support.records import Record, Run
from tests.support.reference_run import (
    build_trainer,
    forget_accelerate,
    merge_batches,
    run_references,
    run_turbo_all,
)
from tests.support.spawn import init_gloo, run_plain, run_plain_jobs, run_ranks
from tests.support.tiny_models import texts

RECOMPUTE = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
FLOAT32 = "accumulated recompute unclipped auto adapters object trainer dpo reward linear tied capped".split()
FLOAT32 += ["one pass", "one pass, looked at", "one pass, unclipped"]
HEAD = {"fused_linear_cross_entropy": "on"}
OUR_HEAD = "accumulated recompute adapters object linear tied capped".split()
CAPPED = {"final_logit_softcapping": 0.5, "logit_scale": 1.7}  # TRL's head reads them of any config
ILL_CONDITIONED = ("linear",)  # its decay rates


OURS = {"ep_dispatcher": "fused", "optim_implementation": "fsdpturbo"}
ONE_PASS = {"gradient_accumulation_steps": 2, "weight_decay": 0.1}


def never_clip(trainer: Any) -> None:
    """The fault put back: the factor does not reach the optimizer."""
    clip = trainer._norm.clip
    trainer._norm.clip = lambda model, max_norm: clip(model, float("inf"))


def clip_twice(trainer: Any) -> None:
    """The fault put back: gradients are scaled in memory, and once more by the optimizer."""
    from hf_fsdpturbo import grad_norm

    clip = trainer._norm.clip

    def both(model: Any, max_norm: float) -> torch.Tensor:
        norm = clip(model, max_norm)
        grad_norm.clip_groups_(trainer._norm.groups, max_norm)
        return norm

    trainer._norm.clip = both


def written_copies(trainer: Any) -> dict[str, Any]:
    """Of each copy that the last step left: whether it is its weight, cast; and what the last clip saw."""
    from hf_fsdpturbo.ops import weight_copies

    found = weight_copies.current_copies()
    owned = [found[parameter] for parameter in trainer.model.parameters() if parameter in found]
    equal = [torch.equal(found[p], p.detach().to(found[p].dtype)) for p in trainer.model.parameters() if p in found]
    return {**block_at_work(trainer), "written": len(owned), "equal": all(equal), "dtypes": {c.dtype for c in owned}}


def block_at_work(trainer: Any) -> dict[str, Any]:
    from hf_fsdpturbo.parallelize.fused_experts import FusedForward

    forwards = [m.forward for m in trainer.model.modules() if isinstance(vars(m).get("forward"), FusedForward)]
    return {
        "blocks": len(forwards),
        "head": "LM head: gradients in its forward" in trainer.sharding_report.notes,
        "copies": sum(forward.copies.nbytes() for forward in forwards),
        "norms": {name: float(value) for name, value in (trainer.last_group_norms or {}).items()},
        "stored": {str(parameter.dtype) for parameter in trainer.model.parameters()},
    }


def runs_of(tiny: Any) -> dict[str, Run]:
    path, data = tiny("qwen3_moe"), {"text": texts(24)}
    ours: dict[str, Any] = {"turbo": {"ep_dispatcher": "fused"}, "after_train": block_at_work}
    both = {**ours, "turbo": {"ep_dispatcher": "fused", **HEAD}}
    bf16 = {"bf16": True, "gradient_accumulation_steps": 2, "optim": "adamw_torch_fused"}
    return {
        "accumulated": Run(path, data, {"gradient_accumulation_steps": 2}, **both),
        "recompute": Run(path, data, RECOMPUTE, **both),
        "unclipped": Run(path, data, {"max_grad_norm": 0.0}, **ours),
        "auto": Run(path, data, turbo={"ep_dispatcher": "auto"}, after_train=block_at_work),
        "adapters": Run(path, data, trainer_kwargs={"peft_config": lora(init_lora_weights=False)}, **both),
        "object": Run(path, data, as_object=True, **both),
        "trainer": Run(path, data, trainer="plain", **ours),
        "dpo": Run(path, pairs(8), {"max_steps": 2}, trainer="dpo", **ours),
        "reward": Run(path, pairs(8), {"max_steps": 2, "learning_rate": 1e-4}, trainer="reward", **ours),
        "linear": Run(tiny("qwen3_5_moe", layers=4), data, {"learning_rate": 1e-4}, **both),
        "tied": Run(tiny("qwen3_moe", tie=True), data, **both),
        "capped": Run(tiny("qwen3_moe", **CAPPED), data, {"gradient_accumulation_steps": 2}, **both),
        "bf16": Run(path, data, bf16, **both),
        "bf16 recompute": Run(path, data, {**bf16, **RECOMPUTE}, **both),
        "one pass": Run(path, data, ONE_PASS, OURS, gradients=False, after_train=written_copies),
        "one pass, looked at": Run(path, data, ONE_PASS, OURS, after_train=written_copies),
        "one pass, unclipped": Run(
            path, data, {**ONE_PASS, "max_grad_norm": 0.0}, OURS, gradients=False, after_train=written_copies
        ),
        "one pass, never": Run(path, data, ONE_PASS, OURS, gradients=False, before_train=never_clip),
        "one pass, twice": Run(path, data, ONE_PASS, OURS, gradients=False, before_train=clip_twice),
        "bf16 one pass": Run(path, data, bf16, OURS, gradients=False, after_train=written_copies),
        "bf16, torch's": Run(path, data, bf16, {"ep_dispatcher": "fused"}, gradients=False),
        "other experts": Run(tiny("gpt_oss"), data, **ours),
        "default on CPU": Run(path, data, after_train=block_at_work),
    }


@pytest.fixture(scope="module")
def records(tiny) -> dict[str, tuple[Record, ...]]:
    """By name: our record and plain TRL's on the same batches; for bf16 also with Transformers' eager experts."""
    runs = runs_of(tiny)
    ours = dict(zip(runs, run_plain_jobs(run_turbo_all, list(runs.values()), timeout=150), strict=True))
    eager = {"experts_implementation": "eager"}
    plainly = {name: replace(run, before_train=None, after_train=None) for name, run in runs.items()}
    jobs = {name: (run, 1, ours[name].batches) for name, run in plainly.items()}
    jobs["float32"] = (replace(jobs["bf16"][0], args={**runs["bf16"].args, "bf16": False}), 1, ours["bf16"].batches)
    jobs["eager"] = (replace(jobs["bf16"][0], model_kwargs=eager), 1, ours["bf16"].batches)
    for name in ILL_CONDITIONED:
        jobs[f"{name}, eager"] = (replace(jobs[name][0], model_kwargs=eager), 1, ours[name].batches)
    plain = dict(zip(jobs, run_plain_jobs(run_references, list(jobs.values()), timeout=150), strict=True))
    both: dict[str, tuple[Record, ...]] = {name: (ours[name], plain[name]) for name in runs}
    return both | {name: (plain[name],) for name in jobs.keys() - runs.keys()}


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_equals_plain(records, name):
    record, reference = records[name]
    yardstick = records[f"{name}, eager"][0] if name in ILL_CONDITIONED else None
    comparison = compare(record, reference, yardstick=yardstick)
    assert comparison, comparison.report
    assert record.extra["after"]["blocks"] == (4 if name == "linear" else 2)
    assert record.extra["after"]["norms"]["total"] == record.grad_norms[-1], "the norm is ours"


@pytest.mark.parametrize("name", OUR_HEAD)
def test_the_heads_metrics_are_trls(records, name):
    record, reference = records[name]
    assert record.extra["after"]["head"]
    for mine, theirs in zip(record.log_history, reference.log_history, strict=True):
        for metric in {"entropy", "mean_token_accuracy", "aux_loss", "num_tokens"} & theirs.keys():
            assert mine[metric] == pytest.approx(theirs[metric], rel=1e-5), metric


@pytest.mark.parametrize("name", ["accumulated", "unclipped", "recompute"])
def test_the_norm_is_the_parents(records, name):
    record, reference = records[name]
    assert record.grad_norms == pytest.approx(reference.grad_norms, rel=1e-6)


def far(record: Record, truth: Record) -> dict[str, float]:
    """Distance of losses, and of the first step's gradients all together."""
    steps = record.gradients[0], truth.gradients[0]
    gradients = [torch.cat([step[name].flatten() for name in sorted(step)]) for step in steps]
    losses = [torch.tensor(each.losses) for each in (record, truth)]
    return {"gradients": distance(*gradients), "losses": distance(*losses)}


def test_bf16_is_no_further_from_float32_than_plain(records):
    """Plain with experts that autocast reaches; plain by default runs them in float32."""
    (truth,), (eager,) = records["float32"], records["eager"]
    for name in ("bf16", "bf16 recompute"):
        mine, allowed = far(records[name][0], truth), far(eager, truth)
        print(name, mine, allowed, far(records[name][1], truth))
        assert mine["gradients"] <= 1.1 * allowed["gradients"]
        assert mine["losses"] <= 1.1 * allowed["losses"] + 1e-4


def test_float32_storage_stays_and_copies_go_with_the_step(records):
    after = records["bf16"][0].extra["after"]
    assert after["stored"] == {"torch.float32"}
    assert after["copies"] == 0


@pytest.mark.parametrize("fault", ["never", "twice"])
def test_a_wrong_clip_would_be_seen(records, fault):
    record, reference = records[f"one pass, {fault}"]
    comparison = compare(record, reference)
    assert any(row.startswith("weights") for row in comparison.failed()), comparison.report


def test_one_pass_writes_the_copies_of_the_next_forward(records):
    """As many as there are stacks of experts; steps and losses are those of torch's AdamW on converted weights."""
    record, torchs = records["bf16 one pass"][0], records["bf16, torch's"][0]
    after = record.extra["after"]
    assert (after["written"], after["equal"], after["dtypes"]) == (4, True, {torch.bfloat16})
    assert after["copies"] > 0
    assert compare(record, torchs, what=("losses", "grad_norms", "weights"))


def test_what_is_not_ours_is_plain(records):
    for name in ("other experts", "default on CPU"):
        record, reference = records[name]
        assert record.extra["after"] == {**record.extra["after"], "blocks": 0, "norms": {}}
        assert compare(record, reference, 0.0 if name == "default on CPU" else 1e-5)


def ddp_gradients(path: str) -> list[float]:
    """Rank function: distances of gradients under DDP, our block against the model's own, at two micro-batches."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForCausalLM

    from hf_fsdpturbo import enable_fused_experts

    init_gloo()
    ids = torch.randint(3, 384, (2, 24), generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for ours in (False, True):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if ours:
            assert enable_fused_experts(model).names
        wrapped = DistributedDataParallel(model)
        with wrapped.no_sync():
            wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        wrapped(input_ids=ids + 1, labels=ids + 1, use_cache=False).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    return [distance(found[1][name], gradient) for name, gradient in found[0].items()]


def test_ddp_without_our_trainers(tiny):
    for distances in run_ranks(ddp_gradients, 2, tiny("qwen3_moe"), timeout=60):
        assert max(distances) < 1e-5


def test_the_registry_name_under_ep(tiny):
    """In a sharded run the dispatcher is the path; ``eager`` runs our block on this rank's experts."""
    name = {"experts_implementation": "fsdpturbo"}
    run = Run(tiny("qwen3_moe"), {"text": texts(24)}, {"max_steps": 2}, {"ep_size": 2}, model_kwargs=name)
    ranks = run_ranks(run_turbo_all, 2, [run], timeout=90)
    records = [records[0] for records in ranks]
    plain = replace(run, model_kwargs={})
    (reference,) = run_plain_jobs(run_references, [(plain, 2, merge_batches(records))], timeout=60)
    comparison = compare(records[0], reference)
    assert comparison, comparison.report


def two_halves(run: Run, folder: str) -> dict[str, Any]:
    """In one plain process: six steps at once, and three, a checkpoint, three more; the export of the latter."""
    from transformers import AutoModelForCausalLM

    def train(steps: int, name: str, resume: str | None = None) -> Any:
        forget_accelerate()
        args = {"max_steps": steps, "save_strategy": "steps", "save_steps": 3, "output_dir": f"{folder}/{name}"}
        trainer = build_trainer(replace(run, gradients=False), turbo=True, **args)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train(6, "whole")
    halves = train(6, "halves", f"{folder}/whole/checkpoint-3")
    halves.save_model(f"{folder}/export")
    exported = AutoModelForCausalLM.from_pretrained(f"{folder}/export")
    named = [dict(trainer.model.named_parameters()) for trainer in (whole, halves)]
    return {
        "resumed": max(distance(named[1][name], weight) for name, weight in named[0].items()),
        "exported": max(distance(weight, named[1][name]) for name, weight in exported.named_parameters()),
        "losses": [[log["loss"] for log in t.state.log_history if "loss" in log] for t in (whole, halves)],
    }


def test_resume_goes_on_as_if_nothing_happened_and_the_export_is_plain(tiny, tmp_path):
    run = runs_of(tiny)["bf16"]
    found = run_plain(two_halves, replace(run, before_train=None, after_train=None), str(tmp_path), timeout=90)
    assert found["losses"][0] == found["losses"][1]
    assert found["resumed"] == 0.0
    assert found["exported"] == 0.0
