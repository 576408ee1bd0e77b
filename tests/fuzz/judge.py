"""What a case came to on all ranks, in one word, and the run of many cases."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from typing import Any

from tests.fuzz.cases import Case, draw
from tests.fuzz.named import named_cases
from tests.fuzz.trial import SECONDS, try_cases
from tests.support.spawn import RankError, run_plain, run_ranks

REFUSED, HARMLESS, DATA, WRONG, BARE, HANG, OUTSIDE = (
    "refused by name on all ranks",
    "accepted and harmless",
    "data bits of a released checkpoint",
    "accepted and wrong",
    "bare",
    "hang",
    "outside",
)
BAD = (WRONG, BARE, HANG, OUTSIDE)
CHUNK = 100


def make_good(folder: str) -> dict[str, str]:
    """Whole inputs: two model folders, a checkpoint of two steps, and a folder outside all of them."""
    from tests.support.tiny_models import save_tiny

    good = {name: os.path.join(folder, name) for name in ("single", "pieces", "outside")}
    save_tiny("qwen3_moe", good["single"])
    save_tiny("qwen3_moe", good["pieces"], max_shard_size="40KB")
    os.makedirs(good["outside"])
    shutil.copy(os.path.join(good["single"], "model.safetensors"), os.path.join(good["outside"], "canary.safetensors"))
    return good


def save_checkpoint(good: dict[str, str], run_dir: str) -> None:
    """Rank function: a run of two steps that saves."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

    from hf_fsdpturbo import FSDPTurboSFTConfig, FSDPTurboSFTTrainer
    from tests.support.records import DEFAULT_ARGS

    many = {"ep_size": 2} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
    saving = {"save_strategy": "steps", "save_steps": 2, "checkpoint_format": "dcp"}
    fields = {**DEFAULT_ARGS, "max_length": 16, "max_steps": 2, **saving, **many}
    data = Dataset.from_dict({"text": ["some text that is long enough"] * 6})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(good["single"])
    args = FSDPTurboSFTConfig(**{**fields, "output_dir": run_dir})
    FSDPTurboSFTTrainer(good["single"], args=args, train_dataset=data, processing_class=tokenizer).train()


def judge(case: Case, outcomes: list[dict[str, Any]], whole: dict[str, list[float]]) -> str:
    """One word of the list above.

    Args:
        case: what was spoilt.
        outcomes: by rank.
        whole: digests by rank of what the good inputs give, by kind.
    """
    if all(outcome["error"] for outcome in outcomes):
        named = all(o["refused"] and any(name in o["text"] for name in case.names) for o in outcomes)
        return REFUSED if named else BARE
    if any(outcome["error"] for outcome in outcomes):
        return BARE  # some rank went on
    if case.must_refuse:
        return WRONG
    same = all(abs(o["digest"] - d) <= 1e-9 * abs(d) for o, d in zip(outcomes, whole.get(case.kind, []), strict=False))
    if case.same_weights and not same:
        return DATA if case.data_bits else WRONG
    return HARMLESS


def run(number: int, seed: int, folder: str, world_size: int, first: int = 0, show: bool = False) -> dict[str, Any]:
    """Cases ``first`` to ``first + number``.

    Returns:
        ``counts`` by word, ``kinds`` by kind and word, ``bad`` (number, word, what, messages), ``total``.
    """
    good = make_good(folder)
    start = run_ranks if world_size > 1 else lambda function, _, *rest, **kw: run_plain(function, *rest, **kw)
    start(save_checkpoint, world_size, good, os.path.join(folder, "run"), timeout=90)
    good["checkpoint"] = os.path.join(folder, "run", "checkpoint-2")
    whole = _whole(start, world_size, good, folder)
    untouched = sorted(os.listdir(good["outside"]))
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    bad: list[tuple[int, str, str, list[str]]] = []
    for begin in range(first, first + number, CHUNK):
        numbers = range(begin, min(begin + CHUNK, first + number))
        cases = [draw(n, seed, os.path.join(folder, "cases", str(n)), good) for n in numbers]
        if begin == first:
            cases += named_cases(os.path.join(folder, "cases"), good)
        found = _all_outcomes(start, world_size, cases, good, os.path.join(folder, f"record{begin}"))
        for case in cases:
            outcomes = found[case.number]
            word = HANG if outcomes is None else judge(case, outcomes, whole)
            if sorted(os.listdir(good["outside"])) != untouched:
                word = OUTSIDE
                untouched = sorted(os.listdir(good["outside"]))
            counts[word] += 1
            kinds[f"{case.kind}: {word}"] += 1
            if word in BAD:
                texts = [f"{o['error']}: {o.get('text', o.get('digest'))}"[:300] for o in outcomes or []]
                bad.append((case.number, word, f"{case.kind}: {case.what}", texts))
                if show:
                    print(*bad[-1], sep="\n   ", flush=True)
        shutil.rmtree(os.path.join(folder, "cases"), ignore_errors=True)
    return {"counts": dict(counts), "kinds": dict(kinds), "bad": bad, "total": number}


def _whole(start: Any, world_size: int, good: dict[str, str], folder: str) -> dict[str, list[float]]:
    cases = [Case(0, "model"), Case(1, "checkpoint", checkpoint=good["checkpoint"])]
    found = _all_outcomes(start, world_size, cases, good, os.path.join(folder, "record"))
    for case in cases:
        assert found[case.number] is not None, case
        assert not any(o["error"] for o in found[case.number]), found
    return {case.kind: [o["digest"] for o in found[case.number]] for case in cases}


def _all_outcomes(
    start: Any, world_size: int, cases: list[Case], good: dict[str, str], record: str
) -> dict[int, list[dict[str, Any]] | None]:
    """Outcomes by rank of each case, None for a hang; ranks are started again after one."""
    found: dict[int, list[dict[str, Any]] | None] = {}
    left = cases
    while left:
        try:
            start(try_cases, world_size, left, good, record, timeout=60 + SECONDS + 2 * len(left))
        except RankError as error:
            print(f"started again: {str(error)[:2000]}", flush=True)
        by_rank = [_read(f"{record}.{rank}") for rank in range(world_size)]
        done = [case for case in left if all(case.number in each for each in by_rank)]
        found.update({case.number: [each[case.number] for each in by_rank] for case in done})
        left = [case for case in left if case.number not in found]
        if left:
            found[left[0].number] = None
            left = left[1:]
    return found


def _read(path: str) -> dict[int, dict[str, Any]]:
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    return {line["number"]: line for line in lines}
