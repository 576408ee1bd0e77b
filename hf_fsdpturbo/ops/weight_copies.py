"""Weights in the dtype they compute in, converted once a step where they are stored in another.

Autocast does not reach ``grouped_mm``: float32 weights under bf16 autocast would compute in float32. A copy serves all
micro-batches, recompute and evaluation until the weight changes; gradients go to the stored weight in its own dtype.

Note [When a copy is stale]. A parameter's ``_version`` tells of every in-place operation that autograd can see:
``load_state_dict``, edits under ``no_grad``, most optimizers. It does not tell of the fused ones
(``adamw_torch_fused``, Transformers' default, leaves it as it was: seen with torch 2.13), nor of edits through
``.data``. So all copies of the process are dropped round every optimizer's step, and a copy also ends when the module
goes from training to evaluation or back (averaged weights are swapped in there, through ``.data``). What is left
unseen: an edit through ``.data`` between two forwards of one kind, without a step.

Note [Copies that an optimizer writes]. Our own AdamW (``optim/one_pass.py``) knows the new weight when it writes it,
and writes the copy beside it: the next forward converts nothing. Only copies of weights that it moved outlive its
step; all others (of frozen weights, of a reference model that a callback then edits through ``.data``) end as round
any optimizer. What is left unseen besides: an edit of a trained weight through ``.data`` after such a step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_fsdpturbo.shards import local_tensor


@dataclass(frozen=True)
class _Copy:
    """A converted weight, and what the weight was then."""

    parameter: weakref.ref[Tensor]
    state: tuple[Any, ...]
    tensor: Tensor


def _state(weight: Tensor, dtype: torch.dtype, mode: Hashable) -> tuple[Any, ...]:
    """What a copy of ``weight`` depends on; a DTensor and its local part count edits each for itself."""
    with torch.no_grad():  # else a DTensor's part is made by autograd, at every call
        local = local_tensor(weight)
    return weight._version, local._version, local.data_ptr(), local.device, dtype, mode


class _ComputeIn(torch.autograd.Function):
    """The copy, its gradient going to the stored weight in that one's dtype, divided in it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor, divisor: int) -> Tensor:
        ctx.dtype, ctx.divisor = weight.dtype, divisor
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.divisor == 1:
            return gradients[0].to(ctx.dtype), None, None
        # a tensor with a dim decides the dtype of the quotient: converted and divided in one pass
        return gradients[0] / gradients[0].new_full((1,), ctx.divisor, dtype=ctx.dtype), None, None


class WeightCopies:
    """Copies of one module's weights, by name.

    Memory: one copy of each weight that is stored in another dtype (for bf16, 2 bytes an element: half of float32
    storage again), from its first forward in a step to the optimizer's step. Copying or pickling the module leaves
    them out.
    """

    def __init__(self) -> None:
        self._copies: dict[str, _Copy] = {}
        _watch_optimizers()
        _living.add(self)

    def get(
        self,
        name: str,
        weight: Tensor,
        dtype: torch.dtype,
        mode: Hashable = None,
        *,
        divisor: int = 1,
        keep: bool = True,
    ) -> Tensor:
        """This rank's part of ``weight`` in ``dtype``: itself, or a copy that is as the weight is now.

        Args:
            name: under which the copy is kept; the next weight of that name replaces it.
            weight: a parameter. Any other tensor (a sum with adapters, made for this call) is converted, not kept.
            dtype: to compute in.
            mode: a copy made under another mode is not used.
            divisor: of the gradient that reaches ``weight`` through a copy.
            keep: False uses a copy that is there, but leaves none behind.

        Returns:
            a tensor whose gradient reaches ``weight``.
        """
        local = local_tensor(weight)
        if weight.dtype == dtype:
            return local
        if not isinstance(weight, nn.Parameter) or weight.is_inference():
            return local.to(dtype)
        state = _state(weight, dtype, mode)
        kept = self._copies.get(name)
        if kept is None or kept.parameter() is not weight or kept.state != state:
            kept = None
            self._copies.pop(name, None)  # before the new one needs its room
            with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not serve training after
                kept = _Copy(weakref.ref(weight), state, local.detach().to(dtype))
            if keep:
                self._copies[name] = kept
        if torch.is_grad_enabled() and weight.requires_grad:
            return _ComputeIn.apply(local, kept.tensor, divisor)
        return kept.tensor

    def forget(self) -> None:
        """Drop all copies; graphs that still need one keep it."""
        self._copies.clear()

    def current(self) -> dict[Tensor, Tensor]:
        """Copies that are as their weight is now, by weight."""
        pairs = ((copy.parameter(), copy) for copy in self._copies.values())
        return {w: copy.tensor for w, copy in pairs if w is not None and copy.state == _state(w, *copy.state[-2:])}

    def keep(self, written: Mapping[Tensor, Tensor]) -> None:
        """Drop all copies but those that have been written with their weight, which are as it is now."""
        kept = {}
        for name, copy in self._copies.items():
            weight = copy.parameter()
            if weight is not None and written.get(weight) is copy.tensor:
                kept[name] = replace(copy, state=_state(weight, *copy.state[-2:]))
        self._copies = kept

    def nbytes(self) -> int:
        """Bytes of the copies held now."""
        return sum(copy.tensor.nbytes for copy in self._copies.values())

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        WeightCopies.__init__(self)


_living: weakref.WeakSet[WeightCopies] = weakref.WeakSet()


def current_copies() -> dict[Tensor, Tensor]:
    """A copy of each weight of this process that has one which is as the weight is now, to be written with it."""
    return {weight: copy for copies in _living for weight, copy in copies.current().items()}


def keep_written(written: Mapping[Tensor, Tensor]) -> None:
    """Of all copies of the process keep those, by weight, that were written with it; drop the others."""
    for copies in _living:
        copies.keep(written)


def _forget_all(optimizer: Any = None, *_: Any) -> None:
    if getattr(optimizer, "writes_weight_copies", False):
        return  # it calls keep_written
    for copies in _living:
        copies.forget()


@functools.cache
def _watch_optimizers() -> None:
    """Once a process. Before a step, to give it the room; after it, for copies that a closure made inside."""
    register_optimizer_step_pre_hook(_forget_all)
    register_optimizer_step_post_hook(_forget_all)
