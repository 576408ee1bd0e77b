"""DPO and reward training under context parallelism equal one process of stock TRL."""

from __future__ import annotations

import pytest

from tests.distributed.test_reward import two_columns
from tests.support.compare import compare
from tests.support.preference_runs import Preference, moved_reference, pairs, plain_references, turbo_ranks
from tests.support.reference_run import Run, merge_batches
from tests.support.spawn import run_plain_jobs, run_ranks

WORLD, CP_SIZE = 4, 2
TURBO = {"ep_size": 2, "cp_size": CP_SIZE}
ACCUMULATE = {"gradient_accumulation_steps": 2}


def against_one_process(jobs):
    """name -> (record, reference, moved reference); a cp group's batches count once."""
    by_rank = run_ranks(turbo_ranks, WORLD, list(jobs.values()), timeout=250)
    merged = [merge_batches([records[index] for records in by_rank[::CP_SIZE]]) for index in range(len(jobs))]
    work = [(job, WORLD // CP_SIZE, batches) for job, batches in zip(jobs.values(), merged, strict=True)]
    moved = [(moved_reference(job), world, batches) for job, world, batches in work]
    references = run_plain_jobs(plain_references, work + moved, timeout=250)
    return dict(zip(jobs, zip(by_rank[0], references[: len(jobs)], references[len(jobs) :], strict=True), strict=True))


def check(results, metrics):
    for name, (record, reference, yardstick) in results.items():
        comparison = compare(record, reference, yardstick=yardstick)
        print(f"{name}: {comparison.report}")
        assert comparison, name
        assert len(record.gradients) == 3
        for mine, theirs in zip(record.log_history, reference.log_history, strict=True):
            for metric in metrics:
                if metric in theirs:
                    assert mine[metric] == pytest.approx(theirs[metric], rel=1e-3, abs=1e-6), metric


def test_dpo(tiny, tmp_path):
    from datasets import Dataset

    on_disk = str(tmp_path / "pairs")  # precomputed log-probabilities go through the data set's cache folder
    Dataset.from_dict(pairs(48)).save_to_disk(on_disk)
    runs = {"path": "qwen3_moe", "none": "qwen3_5_moe", "precomputed": "qwen3_moe"}  # how the reference is given
    jobs = {}
    for how, family in runs.items():
        config = {"layers": 4} if family == "qwen3_5_moe" else {}
        run = Run(tiny(family, **config), on_disk, ACCUMULATE, TURBO, "dpo")
        jobs[how] = Preference(run, how, tiny(family, seed=3, **config))
    check(against_one_process(jobs), ["rewards/margins", "logps/chosen"])


def test_reward(tiny):
    jobs = {"accumulated": Preference(Run(tiny("qwen3_moe"), two_columns(48), ACCUMULATE, TURBO, "reward"))}
    check(against_one_process(jobs), ["mean_reward", "margin"])
