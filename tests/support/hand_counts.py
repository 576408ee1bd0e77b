"""Expert load worked out by hand, in one plain process: what the routers chose for the batch's real tokens.

It shares nothing with ``telemetry``: choices come from the routers' outputs, padding from the model's arguments, and
recompute is known because the test says when a backward runs. E experts, K top-k, T tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.records import Record


class HandCounts:
    """Counts of one model; for each finished step ``steps`` has ``[E]`` by layer, ``entropies`` the routers' mean.

    ``images`` has, for each step, the share of image tokens and their largest load over the mean (None without them).
    """

    def __init__(self, model: nn.Module) -> None:
        routers = [m for m in model.modules() if type(m).__name__.lower().endswith(("topkrouter", "topkgate"))]
        self.model = model
        self.counts = [torch.zeros(router.num_experts, dtype=torch.long) for router in routers]
        self.steps: list[list[Tensor]] = []
        self.entropies: list[float] = []
        self.entropy, self.rows = 0.0, 0
        self.mask: Tensor | None = None
        self.of_image: Tensor | None = None
        self.image_counts = [torch.zeros_like(count) for count in self.counts]
        self.images: list[tuple[float, float | None]] = []
        self.in_backward = False
        for layer, router in enumerate(routers):
            router.register_forward_hook(lambda _, args, out, layer=layer: self._count(layer, out))
        model.register_forward_pre_hook(lambda _, args, kwargs: self._saw(kwargs), with_kwargs=True)

    def _saw(self, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        self.mask = None if mask is None else mask.reshape(-1).bool()
        token = getattr(self.model.config, "image_token_id", None)
        self.of_image = None if token is None else (kwargs["input_ids"] == token).reshape(-1)

    def _count(self, layer: int, output: Any) -> None:
        if self.in_backward or not self.model.training or not torch.is_grad_enabled():
            return
        logits, _, index = output
        real = torch.ones(len(index), dtype=torch.bool) if self.mask is None else self.mask
        for expert in index[real].flatten().tolist():
            self.counts[layer][expert] += 1
        for expert in [] if self.of_image is None else index[self.of_image].flatten().tolist():
            self.image_counts[layer][expert] += 1
        chances = self.chances(logits.detach()[real].double())
        self.entropy += float(-(chances * chances.clamp_min(1e-300).log()).sum())
        self.rows += int(real.sum())

    def chances(self, logits: Tensor) -> Tensor:
        if self.model.config.model_type == "deepseek_v3":
            return logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        return logits.softmax(-1)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Round a backward."""
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False

    def end_step(self) -> None:
        """What was counted since the last one is a step."""
        self.steps.append([counts.clone() for counts in self.counts])
        share = sum(int(c.sum()) for c in self.image_counts) / max(sum(int(c.sum()) for c in self.counts), 1)
        worst = [float(c.max() / c.double().mean()) for c in self.image_counts if c.sum()]
        self.images.append((share, max(worst, default=None)))
        for counts in (*self.counts, *self.image_counts):
            counts.zero_()
        self.entropies.append(self.entropy / max(self.rows, 1))
        self.entropy, self.rows = 0.0, 0


def assert_load(record: Record, reference: Record) -> None:
    """A sharded run's expert load and router entropy are those of one process, step by step."""
    assert len(record.load) == len(reference.load) == len(record.losses)
    for step, (mine, by_hand) in enumerate(zip(record.load, reference.load, strict=True)):
        for layer, (a, b) in enumerate(zip(mine, by_hand, strict=True)):
            assert torch.equal(a, b), f"step {step}, MoE layer {layer}: {a.tolist()}, by hand {b.tolist()}"
    assert record.entropies == pytest.approx(reference.entropies, rel=1e-5)
