"""``LossScale``: a loss that does not divide by the number of items it is given is a mean, and stays one on N ranks.

Trainer gives the loss the number of items (tokens, or labels) of all ranks, and multiplies what comes back by the
ranks, as gradients are averaged. It takes for granted that a forward with ``**kwargs`` divides by the number; a
classifier's does not: its loss, its gradients and its ``eval_loss`` were those of one process times the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_fsdpturbo.parallelize.trainer_family import trl_classes

# What moves a number or asks about it, on its way through wrappers, layers and FSDP.
_MOVES = {"to", "detach", "clone", "contiguous", "float", "double", "cpu", "cuda", "view", "reshape", "expand"}
_ASKS = {"__get__", "dim", "size", "numel", "is_floating_point", "is_complex", "record_stream", "is_contiguous"}


class NotedNumber(Tensor):
    """A number that notes whether anything was computed with it."""

    used: list[str]

    @classmethod
    def of(cls, number: Tensor, used: list[str]) -> NotedNumber:
        """``number``, with the list that takes the names of functions that compute with it."""
        with torch._C.DisableTorchFunctionSubclass():
            noted = number.detach().as_subclass(cls)
        noted.used = used
        return noted

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        used = next(leaf.used for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        if func.__name__ in _MOVES and isinstance(result, Tensor):
            return cls.of(result, used)
        if func.__name__ not in _ASKS:
            used.append(func.__name__)
        return result


class LossScale:
    """Finds out at a trainer's first loss, in training and in evaluation, whether it divides by the number of items.

    Args:
        trainer: read for its model, accelerator and label convention.
        data_ranks: W, ranks that do not share a batch; at 1 nothing is done.
    """

    def __init__(self, trainer: Any, data_ranks: int) -> None:
        self.trainer, self.data_ranks = trainer, data_ranks
        self._divides: dict[bool, bool] = {}  # by whether it trains
        self._used: list[str] | None = None  # while a first loss is computed
        self._open = self._is_mean = False

    def ranks_of_one_loss(self) -> int | None:
        """Trainer multiplies a loss by all ranks over these: all ranks for a mean, None for what it has by itself."""
        if not self._open:
            return None
        divides = bool(self._used) if self._used is not None else self._divides[self.trainer.model.training]
        self._is_mean = not divides
        return None if divides else self.trainer.accelerator.num_processes

    def compute(self, compute: Callable[[Any], Any], inputs: Any, items: Any) -> Any:
        """``compute(items)``, a loss or a tuple that begins with one, of which each item of all ranks has its part.

        Args:
            compute: Trainer's, or what stands before it.
            inputs: the micro-batch.
            items: number of items that make the losses of one step, of all ranks together; or None.
        """
        if self.data_ranks == 1 or not isinstance(items, Tensor):
            return compute(items)
        training = self.trainer.model.training
        self._used = None if training in self._divides else []
        own = self._own(inputs)
        self._open, self._is_mean = True, False
        try:
            result = compute(items if self._used is None else NotedNumber.of(items, self._used))
            if self._used is not None:
                self._divides[training] = bool(self._used)
        finally:
            self._open, self._used = False, None
        if not self._is_mean or own is None:
            return result
        share = own * (self.data_ranks * self.trainer.current_gradient_accumulation_steps) / items
        return (result[0] * share, *result[1:]) if isinstance(result, tuple) else result * share

    def _own(self, inputs: Any) -> Tensor | None:
        """Items of a micro-batch, as Trainer counts them; None for a loss that TRL has added to."""
        if trl_classes(type(self.trainer)) or "labels" not in inputs:
            return None
        labels = inputs.get("shift_labels", inputs["labels"])
        if labels is inputs["labels"] and self.trainer._loss_shifts_labels:
            labels = labels[..., 1:]
        return labels.ne(-100).sum()
