"""``hf-fsdpturbo verify`` of ten families, and with every fault that can be put in: ``make verify``, no part of tests.

    python -m tests.support.verify_all            # all of it: eight minutes on two cores
    python -m tests.support.verify_all --only gpt-oss-20b rank_dies
    python -m tests.support.verify_all -- --layout ep2_efsdp2     # what follows -- goes to every proof

A line a proof; exit status 0 where all families are exact and each fault's row is the first that is red.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hf_fsdpturbo.verify.faults import FAULTS

SHIPPED = ("deepseek-v3", "glm-4.5-air", "gpt-oss-20b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3.5-35b-a3b")
DEFAULTS = ("ernie4_5_moe", "minimax_m2", "olmoe", "qwen3_next")
"""Model types as their classes' defaults have them."""
FAMILIES = (*SHIPPED, *DEFAULTS)
FAULTY = "qwen3-30b-a3b"  # it has a router loss to lose
BEFORE = {"gradients": {"loss"}, "norm": {"loss", "gradients"}}
"""Rows that may be red before a fault's own: a wrong step makes later steps wrong in what the table shows earlier."""


def proofs(only: list[str], folder: Path) -> Iterator[tuple[str, list[str], str | None]]:
    """What is proven, the words for it, and the row that must be red; configs are written to ``folder``."""
    for family in FAMILIES:
        if not only or family in only:
            model = folder / f"{family}.json"
            model.write_text(json.dumps({"model_type": family}), encoding="utf-8")
            yield family, [family if family in SHIPPED else str(model)], None
    for name, fault in FAULTS.items():
        if not only or name in only:
            yield name, [FAULTY, "--inject", name], fault.row


def judge(rows: list[dict[str, str]], red_row: str | None) -> str:
    """Empty where the rows are as they should be, else what is wrong."""
    red = [row["row"] for row in rows if row["verdict"] != "exact"]
    if red_row is None:
        return f"differs: {', '.join(red)}" if red or not rows else ""
    hit = next((row for row in red if row.startswith(red_row)), None)
    if hit is None:
        return f"{red_row} is not red ({', '.join(red) or 'nothing is'})"
    earlier = {row for row in red[: red.index(hit)]} - BEFORE.get(red_row, set())
    return f"red before {red_row}: {', '.join(sorted(earlier))}" if earlier else ""


def main() -> int:
    """Prove one after another."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="python -m tests.support.verify_all")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="families and faults to prove")
    options, more = parser.parse_args(words[:cut]), words[cut + 1 :]
    if unknown := set(options.only) - {*FAMILIES, *FAULTS}:
        parser.error(f"--only: {', '.join(sorted(unknown))}: no family or fault of {', '.join((*FAMILIES, *FAULTS))}")
    with tempfile.TemporaryDirectory(prefix="verify_all_") as folder:
        return prove_all(options.only, more, Path(folder))


def prove_all(only: list[str], more: list[str], folder: Path) -> int:
    """A line each; 1 where one is not as it should be."""
    wrong = 0
    for name, line, row in proofs(only, folder):
        command = [sys.executable, "-m", "hf_fsdpturbo", "verify", *line, "--json", *more]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            found = json.loads(ran.stdout[ran.stdout.index("{") :])
            said = judge(found["rows"], row)
        except ValueError:
            found, said = {}, f"no verdict: {ran.stderr.strip()[-300:]}"
        wrong += bool(said)
        expected = "exact" if row is None else f"red in {row}"
        seconds = found.get("seconds", 0)
        print(f"{'NO ' if said else 'yes'}  {name:<26} {expected:<18} {seconds:>4} s  {said}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
