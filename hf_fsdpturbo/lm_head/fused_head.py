"""TRL's fused LM head with ours inside: what runs the base model, masks labels and adds the aux loss stays TRL's.

``trl.trainer.utils.add_fused_lm_head`` gives a model a forward that calls a global function for the head itself. Ours
is that very function over a copy of its globals, in which the head is :func:`linear_cross_entropy`: nothing of TRL's
is changed for other models, and what a new release does round the head is done here too.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_fsdpturbo.code_facts import functions_of
from hf_fsdpturbo.lm_head.linear_cross_entropy import linear_cross_entropy
from hf_fsdpturbo.ops.table import LogitTransform

HEAD = "_ChunkedLogProbFunction"  # TRL's autograd function
VALID_ONLY = "_use_triton"  # whether only positions with a label go through the head; elsewhere others weigh 0
OUTPUTS = ("log_probs", "entropy", "is_top1")


class LinearCrossEntropy:
    """What TRL's forward finds in place of its autograd function.

    Args:
        head: the LM head where it is an FSDP unit: it is called as a module, so that FSDP gathers its weight and
            reduces its gradient; the weight that TRL's forward hands over is a stand-in then. None: that weight.
    """

    def __init__(self, head: nn.Module | None = None) -> None:
        self.head = head

    def apply(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """``log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1``, each ``[N]`` or None if not in ``outputs``.

        Raises:
            ValueError: ``outputs`` has more than :data:`OUTPUTS`.
        """
        if unknown := [name for name in outputs if name not in OUTPUTS]:
            raise ValueError(
                f"fused_linear_cross_entropy computes {OUTPUTS}, but the fused LM head was made for {unknown} too. "
                "Set fused_linear_cross_entropy='off'."
            )
        transform = LogitTransform(float(logit_scale), final_logit_softcapping, float(temperature))
        if self.head is None:
            found = linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N, transform)
        else:
            found = self.head(hidden_ND, targets_N, transform)
        log_probs_N, entropy_N, is_top1_N = found
        return (
            log_probs_N,
            entropy_N if "entropy" in outputs else None,
            None,
            None,
            is_top1_N if "is_top1" in outputs else None,
        )


class HeadElsewhere:
    """A model as TRL's forward sees it where the head is an FSDP unit: what it reads of the head has no elements."""

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        self._model, self._head = model, head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_output_embeddings(self) -> Any:
        """On the device that computes, where hidden states stay: an offloaded shard lies on the host."""
        weight = cast(Tensor, self._head.weight)
        device = weight.device_mesh.device_type if isinstance(weight, DTensor) else weight.device
        return types.SimpleNamespace(weight=torch.empty(0, device=device), bias=None)


def take_targets(head: nn.Module) -> None:
    """Let an LM head (``nn.Linear``) take ``(hidden, targets, transform)`` too, as a call of the module."""
    linear: Callable[[Tensor], Tensor] = head.forward

    def forward(input: Tensor, targets: Tensor | None = None, transform: LogitTransform | None = None) -> Any:
        if targets is None:
            return linear(input)
        return linear_cross_entropy(input, cast(Tensor, head.weight), cast(Any, head.bias), targets, transform)

    head.forward = forward  # type: ignore[method-assign]


def fused_forward(model: nn.Module) -> types.FunctionType | None:
    """TRL's forward with its fused LM head, None where the model has none.

    Raises:
        HiddenCode: a decorator hides which forward it is.
    """
    forward = model.__dict__.get("forward")
    if forward is None:
        return None
    found = functions_of(forward, f"{type(model).__name__}.forward", "whether it has TRL's fused LM head")
    return next((each for each in found if HEAD in each.__code__.co_names), None)


def install_fused_head(model: nn.Module) -> bool:
    """Give a model that has TRL's fused LM head ours for calls with gradients; others run TRL's own.

    A head that is an FSDP unit runs ours in evaluations too: outside its forward its weight is a shard.

    Args:
        model: what ``add_fused_lm_head`` was called with (the base model under PEFT).

    Returns:
        whether it has that head; without it nothing is changed.
    """
    theirs = fused_forward(model)
    if theirs is None:
        return False
    head = cast(Any, model).get_output_embeddings()
    alone = isinstance(head, FSDPModule)
    if alone:
        take_targets(head)
    own = types.FunctionType(
        theirs.__code__,
        {**theirs.__globals__, HEAD: LinearCrossEntropy(head if alone else None), VALID_ONLY: lambda device: True},
        theirs.__name__,
        theirs.__defaults__,
        theirs.__closure__,
    )
    own.__kwdefaults__ = theirs.__kwdefaults__
    before: Callable[..., Any] = model.forward

    @functools.wraps(before)
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head and (alone or torch.is_grad_enabled()):
            seen = HeadElsewhere(self, head) if alone else self
            return own(seen, *args, fused_lm_head=True, **kwargs)
        return before(*args, fused_lm_head=fused_lm_head, **kwargs)

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]
    return True
