"""DPO and reward runs over `reference_run`: pairs of text, each form of reference, stock TRL on the same ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.support.reference_run import (
    Record,
    Run,
    build_trainer,
    forget_accelerate,
    merge_batches,
    run_reference,
    run_turbo,
)
from tests.support.tiny_models import texts

TIMES = ("runtime", "per_second", "preparation_time", "total_flos")
TELEMETRY = ("memory_", "data_wait", "grad_norm_", "experts/", "straggler_")
"""Of ours in training lines (docs/telemetry.md); rates are among the times."""


def pairs(number: int, seed: int = 0) -> dict[str, list[str]]:
    """Columns prompt, chosen, rejected; lengths uneven."""
    return {
        "prompt": texts(number, shortest=8, longest=30, seed=seed),
        "chosen": texts(number, shortest=20, longest=90, seed=seed + 1),
        "rejected": texts(number, shortest=20, longest=90, seed=seed + 2),
    }


@dataclass(frozen=True)
class Preference:
    """A DPO or reward run.

    Attributes:
        how: how its reference is given: "none", "path", "object", "precomputed".
        reference: path of the reference, for "path" and "object".
    """

    run: Run
    how: str = "none"
    reference: str | None = None


def _with_reference(job: Preference, turbo: bool) -> Run:
    run = job.run
    if job.how == "precomputed":
        # One process without it is the stricter comparison: it computes the reference in each step.
        return replace(run, args={**run.args, "precompute_ref_log_probs": turbo})
    if job.how in ("path", "object"):
        reference: Any = job.reference
        if job.how == "object" or not turbo:  # TRL takes objects only
            from transformers import AutoModelForCausalLM

            reference = AutoModelForCausalLM.from_pretrained(job.reference, dtype=torch.float32)
        return replace(run, trainer_kwargs={**run.trainer_kwargs, "ref_model": reference})
    return run


def turbo_ranks(jobs: list[Preference]) -> list[Record]:
    """Rank function."""
    return [run_turbo(_with_reference(job, turbo=True)) for job in jobs]


def plain_references(jobs: list[tuple[Preference, int, list[dict[str, Any]]]]) -> list[Record]:
    """For one plain process."""
    return [run_reference(_with_reference(job, turbo=False), world, batches) for job, world, batches in jobs]


def stock_ranks(jobs: list[Preference]) -> list[list[dict[str, Any]]]:
    """Rank function: stock TRL, data parallel, on the same ranks; returns the logs."""
    result = []
    for job in jobs:
        forget_accelerate()
        trainer = build_trainer(_with_reference(job, turbo=False), turbo=False, ddp_find_unused_parameters=True)
        trainer.train()
        if job.run.eval_data is not None:
            trainer.evaluate()
        result.append(list(trainer.state.log_history))
    return result


def against_one_process(
    jobs: dict[str, Preference], world_size: int, *, timeout: float = 250, yardstick: bool = False
) -> dict[str, tuple[Record, Record, Record | None]]:
    """All jobs in one spawn, then their references, each in one plain process (as ``sharded_and_reference`` does).

    With ``yardstick`` the third record is a second reference: its experts are computed one by one, and its weights
    begin half an ulp away. How far it ends from the first says how well conditioned each tensor is.
    """
    from tests.support.spawn import run_plain_jobs, run_ranks

    by_rank = run_ranks(turbo_ranks, world_size, list(jobs.values()), timeout=timeout)
    merged = [merge_batches([records[index] for records in by_rank]) for index in range(len(jobs))]
    work = [(job, world_size, batches) for job, batches in zip(jobs.values(), merged, strict=True)]
    if yardstick:
        work += [(moved_reference(job), world_size, batches) for job, _, batches in work]
    references = run_plain_jobs(plain_references, work, timeout=timeout)
    seconds = references[len(jobs) :] if yardstick else [None] * len(jobs)
    for index, record in enumerate(by_rank[0]):
        record.extra["ranks"] = [records[index] for records in by_rank]
    triples = zip(by_rank[0], references[: len(jobs)], seconds, strict=True)
    return dict(zip(jobs, triples, strict=True))


def moved_reference(job: Preference) -> Preference:
    """The yardstick of :func:`against_one_process`."""
    kwargs = {**job.run.model_kwargs, "experts_implementation": "eager"}
    return replace(job, run=replace(job.run, model_kwargs=kwargs, before_train=_move))


def _move(trainer: Any) -> None:
    from hf_fsdpturbo.verify.random_weights import move_by_half_an_ulp

    move_by_half_an_ulp(trainer.model)


def evaluated(job: Preference, turbo: bool, fault: bool = False) -> dict[str, float]:
    """Rank function (and for one plain process): metrics of ``evaluate()``; the fault counts repeats as stock does."""
    from hf_fsdpturbo import FSDPTurboTrainerMixin

    if fault:
        del FSDPTurboTrainerMixin.evaluation_loop, FSDPTurboTrainerMixin.prediction_step
    forget_accelerate()
    return values([build_trainer(_with_reference(job, turbo), turbo=turbo).evaluate()])[0]


def values(logs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Logs without wall-clock entries and telemetry, which stock trainers do not have."""
    return [{k: float(v) for k, v in log.items() if not any(t in k for t in (*TIMES, *TELEMETRY))} for log in logs]
