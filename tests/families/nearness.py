"""How far bf16 gradients are from float32 truth: ours against plain's, tensor by tensor, with the truth's choices.

    plain process  truth (float32, on the weights as stored) and plain's bf16 (autocast), choices forced
    ranks          ours in bf16, choices forced
    distance       root of the sum, over SEEDS batches, of ||gradient - truth||^2; the ratio is ours by plain's

Note [Float32 experts of plain]. Autocast reaches no grouped matmul, so with float32 storage plain's experts compute in
float32, and nothing between a layer's norm and its experts' output is rounded. Ours compute in bf16, which is 2.8
times faster on an H200. What that costs next to plain is bounded like all else; a tensor that is over the bound for
this reason alone must be as near as plain is once autocast reaches its experts too (``REACHED``).

Note [Tiny tensors]. The distance of three numbers is luck, over four batches too: the standard error of a ratio is
taken from its spread over the batches (jackknife), and below ``TINY`` elements three of them are granted. A larger
tensor's is about 2 %; it is granted nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.families.choices import Choices, GroupedMatmulsInBf16, watch_experts
from tests.families.training import batches, loss_of, whole

SEEDS, MICRO_BATCHES = 6, 2
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BOUND, REACHED, TINY = 1.5, 1.1, 64
NO_CHOICE = {
    "llama4": "our block asks topk in another order than plain's: its choices cannot be forced",
    "longcat_flash": "our block hands pairs to its experts, plain's tokens: what reaches them cannot be compared",
    "phimoe": "its router draws among those over a threshold and asks no topk: its choices cannot be forced",
}
"""Families that are not compared, and why."""
NOISE = 1e-6
"""Relative distance below which a gradient is exact in float32."""

Choice = dict[tuple[int, int], list[Tensor]]
Squares = dict[str, list[float]]


@dataclass
class Gradients:
    """Of one model: whole gradients by seed and name, choices by seed and micro-batch, indices at the experts."""

    by_seed: list[dict[str, Tensor]] = field(default_factory=list)
    choices: Choice = field(default_factory=dict)
    reached: dict[str, list[Tensor]] = field(default_factory=dict)
    flipped: int = 0


def gradients(
    model: Any,
    place: tuple[int, int] = (0, 1),
    *,
    forced: Choice | None = None,
    settle: Callable[[Any], None] | None = None,
    autocast: bool = False,
    grouped: bool = False,
) -> Gradients:
    """Gradients of every seed's micro-batches, in float32; no weight changes.

    Args:
        model: plain or sharded.
        place: this rank's place among the data ranks, and their number.
        forced: choices of another run; None: its own.
        settle: called when a seed's gradients are there.
        autocast: compute in bf16 as a plain Trainer does.
        grouped: autocast reaches grouped matmuls.
    """
    model.train()
    found, (rank, ranks) = Gradients(), place
    seen = watch_experts(model)
    for seed in range(SEEDS):
        own = batches(seed)[:MICRO_BATCHES]
        for index in range(rank, len(own), ranks):
            with ExitStack() as modes:
                choices = modes.enter_context(Choices(None if forced is None else forced[seed, index]))
                modes.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=autocast))
                if grouped:
                    modes.enter_context(GroupedMatmulsInBf16())
                loss = loss_of(model, own[index]).float() / (len(own) // ranks)
                loss.backward()
            choices.check_all_used()
            found.choices[seed, index], found.flipped = choices.made, found.flipped + choices.flipped
            for name, indices in seen.items():
                found.reached[f"{name}, batch {seed}.{index}"] = list(indices)
                indices.clear()
        if settle is not None:
            settle(model)
        named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
        found.by_seed.append({name: whole(p.grad).float() for name, p in named})
        model.zero_grad()
    return found


def squares(found: Gradients, truth: Gradients) -> Squares:
    """``||gradient - truth||^2`` by tensor, a number a seed; a gradient that is not there counts as zeros."""
    result: Squares = {}
    for mine, true in zip(found.by_seed, truth.by_seed, strict=True):
        for name in mine.keys() | true.keys():
            a, b = (side.get(name, torch.zeros(())).double() for side in (mine, true))
            result.setdefault(name, []).append(float((a - b).square().sum()))
    return result


def check_same_experts(found: Gradients, truth: Gradients) -> None:
    """Every experts module was called with the truth's indices.

    Raises:
        AssertionError: naming the first that was not, or that no index reached any.
    """
    reached = {name: indices for name, indices in found.reached.items() if indices}
    for name, indices in reached.items():
        expected = truth.reached[name]
        if len(indices) != len(expected) or not all(map(torch.equal, indices, expected)):
            raise AssertionError(f"{name}: other experts than in the truth.")
    if not reached and any(truth.reached.values()):
        raise AssertionError("no expert index was seen, but the truth has some.")


def prepare_nearness(load: Callable[[torch.dtype], Any], folder: Path) -> dict[str, Any]:
    """For one plain process: truth and plain's distances by storage dtype, for the ranks. ``load`` gives the model."""
    folder.mkdir(parents=True, exist_ok=True)
    left: dict[str, Any] = {}
    for name, dtype in STORED.items():
        truth = gradients(load(dtype).float())
        plain = gradients(load(dtype), forced=truth.choices, autocast=True)
        check_same_experts(plain, truth)
        distances = {"plain": squares(plain, truth)}
        if dtype == torch.float32:
            reached = gradients(load(dtype), forced=truth.choices, autocast=True, grouped=True)
            distances["reached"] = squares(reached, truth)
        left[name] = {"truth": truth, "distances": distances, "flipped": plain.flipped}
    torch.save(left, folder / "nearness.pt")
    return {}


@dataclass(frozen=True)
class Row:
    """One tensor: RMS distances relative to the truth, ratio ours by plain's with its standard error in logarithms.

    ``reached``: ratio to plain whose autocast reaches its experts, None with bf16 storage.
    """

    name: str
    elements: int
    ours: float
    plain: float
    ratio: float
    error: float
    reached: float | None

    @property
    def sure(self) -> float:
        """The ratio less what is granted: see Note [Tiny tensors]."""
        return self.ratio * math.exp(-3 * self.error) if self.elements < TINY else self.ratio

    @property
    def is_near(self) -> bool:
        """Within the bound, or over it for the one known reason: see Note [Float32 experts of plain]."""
        return self.ours <= NOISE or self.sure <= BOUND or (self.reached is not None and self.reached <= REACHED)

    def __str__(self) -> str:
        by = "-" if self.reached is None else f"{self.reached:.2f}"
        numbers = f"{self.ratio:6.2f} {self.error:5.2f} {by:>6} {self.ours:9.1e} {self.plain:9.1e} {self.elements:7}"
        return f"{numbers} {self.name}"


def rows(mine: Squares, distances: dict[str, Squares], truth: Gradients) -> list[Row]:
    """The table, largest ratio first."""
    size = squares(truth, Gradients([{} for _ in truth.by_seed]))
    found = []
    for name, ours in mine.items():
        plain, reached = distances["plain"][name], distances.get("reached", {}).get(name)
        scale = math.sqrt(sum(size[name])) or 1.0
        found.append(
            Row(
                name,
                truth.by_seed[0].get(name, torch.zeros(())).numel(),
                math.sqrt(sum(ours)) / scale,
                math.sqrt(sum(plain)) / scale,
                _ratio(ours, plain),
                _error(ours, plain),
                None if reached is None else _ratio(ours, reached),
            )
        )
    return sorted(found, key=lambda row: -row.ratio)


def _ratio(ours: list[float], plain: list[float]) -> float:
    if sum(ours) == 0.0:
        return 0.0
    return math.sqrt(sum(ours) / sum(plain)) if sum(plain) else math.inf


def _error(ours: list[float], plain: list[float]) -> float:
    """Standard error of the ratio's logarithm: the jackknife over seeds."""
    less = [_ratio(ours[:i] + ours[i + 1 :], plain[:i] + plain[i + 1 :]) for i in range(len(ours))]
    if not all(0.0 < ratio < math.inf for ratio in less):
        return 0.0
    logs = [math.log(ratio) for ratio in less]
    mean = sum(logs) / len(logs)
    return math.sqrt((len(logs) - 1) / len(logs) * sum((log - mean) ** 2 for log in logs))


HEAD = "ours by plain; its standard error; by plain whose autocast reaches its experts; ours; plain; elements; tensor"


def compare(mine: Gradients, left: dict[str, Any]) -> list[Row]:
    """Our gradients with what :func:`prepare_nearness` left for this storage dtype.

    Raises:
        AssertionError: the experts were called with other indices.
    """
    check_same_experts(mine, left["truth"])
    return rows(squares(mine, left["truth"]), left["distances"], left["truth"])


def recall_nearness(folder: Path) -> dict[str, Any]:
    """What :func:`prepare_nearness` left, by storage dtype."""
    found: dict[str, Any] = torch.load(folder / "nearness.pt", weights_only=False, mmap=True)
    return found
