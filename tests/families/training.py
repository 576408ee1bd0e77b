"""Two optimizer steps on four small micro-batches, the same in one process and on ranks; what they leave behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

MICRO_BATCHES, ROWS, LENGTH = 4, 2, 24
FIRST_ID, LAST_ID = 3, 340  # the ids above are image and audio tokens in some families
STEPS, RATE, EPSILON = 2, 1e-3, 1e-6
"""At Adam's own epsilon of 1e-8 an element whose gradient is rounding noise moves a whole step up or down."""

CANVAS = {"diffusion_gemma"}
"""Families without a loss in Transformers: a canvas of tokens, drawn at random unless it is given, is refined."""


@dataclass
class Trained:
    """Losses of both steps, whole gradients of the first, whole weights after the last."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def batches(seed: int = 0) -> list[Tensor]:
    """Ids of every micro-batch, ``[ROWS, LENGTH]`` each."""
    generator = torch.Generator().manual_seed(1 + seed)
    return [torch.randint(FIRST_ID, LAST_ID, (ROWS, LENGTH), generator=generator) for _ in range(MICRO_BATCHES)]


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """The model's own loss (aux losses included); cross entropy of every token for a model that fills a canvas."""
    if model.config.model_type in CANVAS:
        out = model(input_ids=ids, decoder_input_ids=ids, use_cache=False)
        return F.cross_entropy(out.logits.flatten(0, 1).float(), ids.flatten())
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, a copy; a collective if it is a DTensor."""
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def train(
    model: Any,
    place: tuple[int, int] = (0, 1),
    *,
    settle: Callable[[Any], None] | None = None,
    autocast: bool = False,
) -> Trained:
    """Train in place.

    Args:
        model: plain or sharded.
        place: this rank's place among the data ranks, and their number.
        settle: called with the model when a step's gradients are there, as a trainer does before it clips.
        autocast: compute in bf16 as a plain Trainer does.
    """
    model.train()
    rank, ranks = place
    own = batches()[rank::ranks]
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=RATE, eps=EPSILON, foreach=False)
    result = Trained()
    for step in range(STEPS):
        total = torch.zeros(())
        for ids in own:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model, ids).float() / len(own)
            loss.backward()
            total += loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        result.losses.append(float(total))
        if settle is not None:
            settle(model)
        if step == 0:
            named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
            result.gradients = {name: whole(p.grad) for name, p in named}
        optimizer.step()
        optimizer.zero_grad()
    result.weights = {name: whole(p) for name, p in model.named_parameters()}
    return result


def distances(mine: Trained, truth: Trained) -> dict[str, float]:
    """``||a - b|| / ||b||`` of every loss, gradient and weight; a gradient that one side lacks counts as zeros."""
    from tests.support.compare import distance

    found = {f"loss {i}": abs(a - b) / abs(b) for i, (a, b) in enumerate(zip(mine.losses, truth.losses, strict=True))}
    for name in mine.gradients.keys() | truth.gradients.keys():
        a, b = mine.gradients.get(name), truth.gradients.get(name)
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        found[f"gradient of {name}"] = distance(a, b)
    for name in mine.weights.keys() | truth.weights.keys():
        a, b = mine.weights.get(name), truth.weights.get(name)
        found[f"weight {name}"] = float("inf") if a is None or b is None else distance(a, b)
    return found
