"""Rows of a proof: what was compared, what is allowed, what was found; and the table that people read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from hf_fsdpturbo.verify.compared import TOLERANCE, Comparison, Row, compare
from hf_fsdpturbo.verify.recording import Record

EXACT, DIFFERS, NOT_RUN = "exact", "differs", "not run"
BF16_LOSSES = 1e-3  # agreeing bf16 runs of the family sweep are within a third of it


@dataclass(frozen=True)
class Verdict:
    """One row. ``allowed`` and ``found`` are relative distances of the worst tensor; None where nothing was found."""

    row: str
    verdict: str
    allowed: float | None = None
    found: float | None = None
    detail: str = ""


def unclipped(record: Record, clip: float) -> Record:
    """The record with gradients as they were before clipping, by its own norms: a wrong norm is the norm's row."""
    steps = []
    for gradients, norm in zip(record.gradients, record.grad_norms, strict=False):
        scale = max(1.0, (norm + 1e-6) / clip)
        steps.append({name: tensor * scale for name, tensor in gradients.items()})
    return Record(gradients=steps)


def worst(row: str, comparison: Comparison, what: str) -> Verdict:
    """The row of a comparison: its worst tensor, named."""
    if not comparison.rows:
        return Verdict(row, DIFFERS, detail=f"no {what} to compare")
    bad = [one for one in comparison.rows if not one.ok]
    most = max(comparison.rows, key=lambda one: one.distance / one.allowed if one.allowed else one.distance)
    count = f"{len(bad)} of {len(comparison.rows)} {what}" if bad else f"{len(comparison.rows)} {what}"
    named = most.what.removeprefix("weights ").removeprefix("start_weights ")
    return Verdict(row, DIFFERS if bad else EXACT, most.allowed, most.distance, f"{count}; worst: {named}")


def loaded(ours: Record, plain: Record) -> Verdict:
    """Every parameter after loading, bit for bit."""
    return worst("loaded", compare(ours, plain, 0.0, what=("start_weights",)), "parameters")


def trained(ours: Record, plain: Record, moved: Record, clip: float) -> Iterator[Verdict]:
    """Loss, gradients, norm, weights: within 1e-5, or ten times what half an ulp in the weights does."""
    for row, field in (("loss", "losses"), ("norm", "grad_norms")):
        steps = _steps(getattr(ours, field), getattr(plain, field), getattr(moved, field))
        yield worst(row, steps, "steps")
        if row == "loss":
            yield gradients("gradients", ours, plain, moved, clip)
    yield worst("weights", compare(ours, plain, yardstick=moved, what=("weights",)), "parameters")


def _steps(mine: list[float], truth: list[float], moved: list[float]) -> Comparison:
    if len(mine) != len(truth):
        return Comparison((Row(f"{len(mine)} steps, not {len(truth)}", float("inf"), TOLERANCE),))
    rows = []
    for step, (a, b, c) in enumerate(zip(mine, truth, moved, strict=True), 1):
        allowed = max(TOLERANCE, 10 * abs(c - b) / abs(b)) if b else TOLERANCE
        off = abs(a - b) / abs(b) if b and a == a else (0.0 if a == b else float("inf"))
        rows.append(Row(f"step {step}: {a:.6f}, plain {b:.6f}", off, allowed))
    return Comparison(tuple(rows))


def gradients(row: str, ours: Record, plain: Record, moved: Record | None, clip: float) -> Verdict:
    """Every gradient of every step that both have."""
    left, right = unclipped(ours, clip), unclipped(plain, clip)
    yardstick = None if moved is None else unclipped(moved, clip)
    if len(left.gradients) < len(right.gradients):
        right.gradients = right.gradients[: len(left.gradients)]
        yardstick = None if yardstick is None else Record(gradients=yardstick.gradients[: len(left.gradients)])
    return worst(row, compare(left, right, yardstick=yardstick, what=("gradients",)), "gradients")


def together(row: str, parts: Sequence[Verdict]) -> Verdict:
    """Several comparisons as one row: the worst of them."""
    bad = [part for part in parts if part.verdict != EXACT]
    if bad:
        return Verdict(row, bad[0].verdict, bad[0].allowed, bad[0].found, f"{bad[0].row}: {bad[0].detail}")
    most = max(parts, key=lambda part: (part.found or 0.0) / (part.allowed or TOLERANCE))
    return Verdict(row, EXACT, most.allowed, most.found, f"{most.row}: {most.detail}")


def same_batches(ours: Record, others: Record) -> bool:
    """Whether a run began with the micro-batches of another one: else its row compares nothing."""
    pairs = list(zip(ours.batches, others.batches, strict=False))
    same = (a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a) for a, b in pairs)
    return bool(pairs) and all(same)


def _same(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and (a == b).all()) if isinstance(a, Tensor) else bool(a == b)


def saved_file(read: Record, plain: Record, moved: Record) -> Verdict:
    """What plain Transformers reads from the saved folder, against the weights of the plain run."""
    weights = worst("weights", compare(read, plain, yardstick=moved, what=("weights",)), "parameters")
    losses = [[one.extra["loss of the end"]] for one in (read, plain, moved)]
    return together("saved file", [weights, worst("loss", _steps(*losses), "batch")])


def resumed(ours: Record, plain: Record, moved: Record, first: int) -> list[Verdict]:
    """Losses after the checkpoint and the weights of the end."""
    cut = [one.losses[first:] for one in (plain, moved)]
    losses = worst("loss", _steps(ours.losses[-len(cut[0]) :], *cut), "steps")
    weights = worst("weights", compare(ours, plain, yardstick=moved, what=("weights",)), "parameters")
    return [losses, weights]


def bf16(ours: Record, plain: Record) -> Verdict:
    """Losses of a bf16 run near plain bf16's: rounding differs, so this row is near and not exact."""
    if len(ours.losses) != len(plain.losses):
        return Verdict("bf16 loss", DIFFERS, detail=f"{len(ours.losses)} steps, plain has {len(plain.losses)}")
    pairs = list(zip(ours.losses, plain.losses, strict=True))
    off = max(abs(a - b) / abs(b) for a, b in pairs)
    shown = ", ".join(f"{a:.4f} / {b:.4f}" for a, b in pairs)
    return Verdict("bf16 loss", EXACT if off <= BF16_LOSSES else DIFFERS, BF16_LOSSES, off, f"ours / plain: {shown}")


def reached(record: Record, experts: int) -> str:
    """How many experts got tokens in the first step, by their gradients: says whether routing is mixed."""
    stacks = [t for n, t in (record.gradients or [{}])[0].items() if t.ndim == 3 and t.shape[0] == experts]
    if not stacks:
        return "routing: not seen in gradients"
    fewest = min(int((stack.flatten(1).abs().amax(1) > 0).sum()) for stack in stacks)
    return f"routing: {fewest} of {experts} experts get tokens in the first step, in the layer with fewest"


def verdict_of(rows: Iterable[Verdict]) -> int:
    """Exit status: 0 where all rows are exact, else 1."""
    found = list(rows)
    return 0 if found and all(row.verdict == EXACT for row in found) else 1


def table(rows: Sequence[Verdict]) -> list[str]:
    """Lines for people."""
    cells = [("row", "allowed", "found", "verdict", "")]
    cells += [(r.row, _number(r.allowed), _number(r.found), r.verdict, r.detail) for r in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(line, [*widths, 0], strict=True)) for line in cells]
    red = [row.row for row in rows if row.verdict != EXACT]
    return [*(line.rstrip() for line in lines), "", "exact" if not red else f"differs: {', '.join(red)}"]


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def as_json(rows: Sequence[Verdict], **more: Any) -> str:
    """The same for programs."""
    return json.dumps({**more, "exact": not verdict_of(rows), "rows": [asdict(row) for row in rows]}, indent=2)
