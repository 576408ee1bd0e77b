"""``recompute``: full and selective give the very gradients of no recompute, everywhere, and run what they say again.

Compared bit for bit: what is kept is what would be made again. Counted on each rank: grouped matmuls, attention calls
and exchanges of rows that really ran, forward and backward of all layers and micro-batches.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.adapter_runs import lora
from tests.support.records import Record, Run
from tests.support.reference_run import run_turbo_all
from tests.support.spawn import run_plain_jobs, run_ranks
from tests.support.tiny_models import texts

MODES = ("none", "full", "selective")
MICRO_BATCHES = 2
FUSED = {"ep_dispatcher": "fused"}
FLOAT32_STORAGE = {"bf16": True}  # weights are stored in float32: bf16 is what they compute in
# place -> (ranks, hf_fsdpturbo fields, case -> (family, fields, training arguments))
PLACES: dict[str, tuple[int, dict[str, Any], dict[str, tuple[str, dict[str, Any], dict[str, Any]]]]] = {
    "one process": (1, {}, {
        "fused": ("qwen3_moe", FUSED, {}),
        "autocast": ("qwen3_moe", FUSED, FLOAT32_STORAGE),
        "adapters": ("qwen3_moe", FUSED, {}),
        "linear": ("qwen3_5_moe", FUSED, {}),
    }),
    "ep2": (2, {"ep_size": 2}, {
        "fused": ("qwen3_moe", FUSED, {}),
        "eager": ("qwen3_moe", {"ep_dispatcher": "eager"}, {}),
        "domino": ("qwen3_moe", {"ep_dispatcher": "domino"}, {}),
        "autocast": ("qwen3_moe", FUSED, FLOAT32_STORAGE),
        "adapters": ("qwen3_moe", FUSED, {}),
        "linear": ("qwen3_5_moe", FUSED, {}),
    }),
    "cp2": (2, {"cp_size": 2}, {
        "fused": ("qwen3_moe", FUSED, {}),
        "linear": ("qwen3_5_moe", FUSED, {}),
    }),
    "two nodes": (4, {"ep_size": 4, "ranks_per_node": 2}, {"fused": ("qwen3_moe", FUSED, {})}),
}  # fmt: skip
CASES = [(place, case) for place, (_, _, cases) in PLACES.items() for case in cases]


class _Counting(TorchDispatchMode):
    """Counts what runs: a call that the tape answers never gets here."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if "scaled_dot_product" in name and "backward" not in name:
            self.counts["attention"] += 1
        return func(*args, **(kwargs or {}))


def begin_counting(trainer: Any) -> None:
    from hf_fsdpturbo.ops import torch as ops

    counts, grouped_mm, exchange = Counter[str](), ops.grouped_mm, dist.all_to_all_single

    def counted_matmul(*args: Any) -> Any:
        counts["matmuls"] += 1
        return grouped_mm(*args)

    def counted_exchange(output: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        counts["exchanges"] += rows.is_floating_point()
        return exchange(output, rows, *args, **kwargs)

    ops.grouped_mm, dist.all_to_all_single = counted_matmul, counted_exchange
    mode = _Counting(counts)
    mode.__enter__()

    def end() -> dict[str, int]:
        mode.__exit__(None, None, None)
        ops.grouped_mm, dist.all_to_all_single = grouped_mm, exchange
        return dict(counts)

    trainer.end_counting = end


def end_counting(trainer: Any) -> dict[str, Any]:
    notes = trainer.sharding_report.notes
    return {"counts": trainer.end_counting(), "notes": [note for note in notes if "recompute" in note]}


def run_of(tiny: Any, place: str, case: str, mode: str) -> Run:
    _, sizes, cases = PLACES[place]
    family, fields, args = cases[case]
    layers = {"layers": 4} if family == "qwen3_5_moe" else {}
    checkpointing = {"activation_checkpointing": mode != "none"}
    return Run(
        tiny(family, **layers),
        {"text": texts(16)},
        {"max_steps": 1, "gradient_accumulation_steps": MICRO_BATCHES, **checkpointing, **args},
        {**sizes, **fields, **({} if mode == "none" else {"recompute": mode})},
        before_train=begin_counting,
        after_train=end_counting,
        trainer_kwargs={"peft_config": lora(init_lora_weights=False)} if case == "adapters" else {},
    )


@pytest.fixture(scope="module")
def records(tiny: Any) -> Any:
    """``records(place)[case, mode]``; each place is one spawn."""
    done: dict[str, dict[tuple[str, str], Record]] = {}

    def carry_out(place: str) -> dict[tuple[str, str], Record]:
        if place not in done:
            world, _, cases = PLACES[place]
            names = list(itertools.product(cases, MODES))
            runs = [run_of(tiny, place, *name) for name in names]
            if world == 1:
                found = run_plain_jobs(run_turbo_all, runs, timeout=150)
            else:
                found = run_ranks(run_turbo_all, world, runs, timeout=150)[0]
            done[place] = dict(zip(names, found, strict=True))
        return done[place]

    return carry_out


@pytest.mark.parametrize(("place", "case"), CASES)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_the_same_bits(records, place, case, mode):
    none, mine = records(place)[case, "none"], records(place)[case, mode]
    assert mine.losses == none.losses
    assert mine.gradients[0].keys() == none.gradients[0].keys()
    for name, gradient in none.gradients[0].items():
        assert torch.equal(mine.gradients[0][name], gradient), name
    assert any(bool(gradient.any()) for gradient in none.gradients[0].values())


# case -> layer and micro-batch: grouped matmuls and exchanges of rows that full and that selective run again
AGAIN = {
    ("one process", "fused"): ({"matmuls": 1}, {}),
    ("one process", "autocast"): ({"matmuls": 1}, {}),
    ("one process", "linear"): ({"matmuls": 2}, {"matmuls": 1}),  # a shared expert follows, so `down` runs again
    ("ep2", "fused"): ({"matmuls": 1, "exchanges": 1}, {}),
    ("ep2", "domino"): ({"matmuls": 2, "exchanges": 2}, {}),  # two slices
    ("ep2", "adapters"): ({"matmuls": 1, "exchanges": 1}, {}),
    ("ep2", "eager"): ({"exchanges": 2}, {"exchanges": 2}),
    ("ep2", "linear"): ({"matmuls": 2, "exchanges": 2}, {"matmuls": 1, "exchanges": 1}),
    ("cp2", "fused"): ({"matmuls": 1}, {}),
    ("two nodes", "fused"): ({"matmuls": 1, "exchanges": 2}, {}),  # two stages
}


@pytest.mark.parametrize(("place", "case"), AGAIN)
def test_what_runs_again(records, place, case):
    layers, attentions = (4, 1) if case == "linear" else (2, 2)
    none = Counter(records(place)[case, "none"].extra["after"]["counts"])
    for mode, each in zip(("full", "selective"), AGAIN[place, case], strict=True):
        counts = Counter(records(place)[case, mode].extra["after"]["counts"])
        found = {kind: counts[kind] - none[kind] for kind in ("matmuls", "exchanges", "attention")}
        if place == "cp2":
            del found["exchanges"]  # those of the heads are among them
        wanted = {kind: each.get(kind, 0) * layers * MICRO_BATCHES for kind in ("matmuls", "exchanges")}
        wanted["attention"] = attentions * MICRO_BATCHES if mode == "full" else 0
        assert found == {kind: wanted[kind] for kind in found}, mode


def test_the_summary_says_what_is_kept(records):
    kept = {case: records("ep2")[case, "selective"].extra["after"]["notes"] for case in ("fused", "eager", "linear")}
    assert len(kept["fused"]) == 1
    assert "2 up matmuls and 2 attentions, rows of 2 exchanges" in kept["fused"][0]
    assert "GiB for" in kept["fused"][0]
    assert "0 up matmuls and 2 attentions" in kept["eager"][0]
    assert "2 expert modules run again (ep_dispatcher=eager)" in kept["eager"][1]
    assert "4 up matmuls and 1 attentions" in kept["linear"][0]
    assert records("ep2")["fused", "full"].extra["after"]["notes"] == []
