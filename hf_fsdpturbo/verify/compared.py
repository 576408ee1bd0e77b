"""Distance of two records, ||a - b|| / ||b|| for every tensor and number, with a report of the worst ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_fsdpturbo.verify.recording import Record

TOLERANCE = 1e-5


def distance(a: Tensor, b: Tensor) -> float:
    """``||a - b|| / ||b||`` in float64; 0 where both are zero, inf where shapes differ or something is not finite."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    difference, size = float((a - b).norm()), float(b.norm())
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / size


@dataclass(frozen=True)
class Row:
    """One compared thing."""

    what: str
    distance: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.distance <= self.allowed


@dataclass(frozen=True)
class Comparison:
    """All rows; truthy when every one is within what is allowed."""

    rows: tuple[Row, ...]

    def __bool__(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def worst(self, prefix: str = "") -> float:
        """Largest distance among rows whose name starts with ``prefix``."""
        return max((row.distance for row in self.rows if row.what.startswith(prefix)), default=0.0)

    def failed(self) -> list[str]:
        """Names of rows out of tolerance."""
        return [row.what for row in self.rows if not row.ok]

    @property
    def report(self) -> str:
        """The ten worst, relative to what is allowed."""
        bad = sum(not row.ok for row in self.rows)
        ranked = sorted(self.rows, key=lambda row: row.distance / row.allowed, reverse=True)[:10]
        lines = [f"{bad} of {len(self.rows)} out of tolerance; the worst:"]
        for row in ranked:
            mark = "ok " if row.ok else "BAD"
            lines.append(f"  {mark} {row.distance:.2e} (allowed {row.allowed:.1e})  {row.what}")
        return "\n".join(lines)


def _pairs(a: Record, b: Record, what: tuple[str, ...]) -> Iterator[tuple[str, Tensor, Tensor]]:
    for name in ("losses", "grad_norms"):
        if name in what:
            yield name, torch.tensor(getattr(a, name)), torch.tensor(getattr(b, name))
    if "gradients" in what:
        if len(a.gradients) != len(b.gradients):
            yield "number of recorded steps", torch.tensor([len(a.gradients)]), torch.tensor([len(b.gradients)])
        for step, (left, right) in enumerate(zip(a.gradients, b.gradients, strict=False), 1):
            yield from _named(f"gradient {step}", left, right)
    for name in ("start_weights", "weights"):
        if name in what:
            yield from _named(name, getattr(a, name), getattr(b, name))


def _named(what: str, left: dict[str, Tensor], right: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    nothing = torch.zeros(0)
    for name in sorted({*left, *right}):
        # A gradient that is None on one side counts as zeros on the other (experts that no token chose).
        one, other = left.get(name), right.get(name)
        if what.startswith("gradient"):
            one = torch.zeros_like(other) if one is None and other is not None else one
            other = torch.zeros_like(one) if other is None and one is not None else other
        yield f"{what} {name}", nothing if one is None else one, nothing if other is None else other


def compare(
    a: Record,
    b: Record,
    tolerance: float = TOLERANCE,
    *,
    yardstick: Record | None = None,
    what: tuple[str, ...] = ("losses", "grad_norms", "gradients", "start_weights", "weights"),
) -> Comparison:
    """Compare a sharded record ``a`` with its reference ``b``.

    Args:
        tolerance: allowed relative distance.
        yardstick: a second reference that computes the same with another kernel; a tensor may then be ten times as far
            from ``b`` as the yardstick is, if that is more than ``tolerance`` (ill-conditioned tensors).
        what: parts of the record to compare.
    """
    allowed = {}
    if yardstick is not None:
        allowed = {name: 10 * distance(one, other) for name, one, other in _pairs(yardstick, b, what)}
    rows = [Row(name, distance(x, y), max(tolerance, allowed.get(name, 0.0))) for name, x, y in _pairs(a, b, what)]
    return Comparison(tuple(rows))
