"""Opt-in for SFT: the LM head works on this rank's slice, and only its per-token results are gathered.

B batch, S sequence, s this rank's slice, D hidden.

By default the last hidden state comes back whole, every cp rank runs the LM head on all of it, and nothing above
needs to know of the cut. TRL's fused head turns hidden states into per-token log-probabilities and metrics; run on
``[B, s, D]`` with labels shifted beforehand, and its results gathered to ``[B, S]``, it gives the same numbers at
1 / cp of the work. The gradient of that gather is the one of hidden states (own slice times cp): no parameter sees a
difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hf_fsdpturbo.code_facts import functions_of
from hf_fsdpturbo.context_parallel.boundary import KEEP_CUT, CutForward
from hf_fsdpturbo.context_parallel.collectives import gather_plain, gather_sequence
from hf_fsdpturbo.packing.sequence_plan import padded_length
from hf_fsdpturbo.packing.text_models import text_models

IGNORED = -100  # label without a loss
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


class CutHead:
    """Callable in place of the forward that ``trl.trainer.utils.add_fused_lm_head`` gave a model.

    Args:
        forward: that forward.
        boundary: what cuts the model's sequence.
    """

    def __init__(self, forward: Callable[..., Any], boundary: CutForward) -> None:
        functools.update_wrapper(self, forward)  # whoever looks at the signature sees the model's
        self.forward = forward
        self.boundary = boundary

    def __call__(self, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """Fused calls with labels ``[B, S]`` run cut and return ``[B, S - 1]`` a field; others are left alone."""
        if not fused_lm_head or labels is None or kwargs.get("shift_labels") is not None:
            if labels is not None:
                kwargs["labels"] = labels
            return self.forward(*args, fused_lm_head=fused_lm_head, **kwargs)
        length = labels.shape[1]
        local = self._local_labels(labels)
        out = self.forward(*args, fused_lm_head=True, shift_labels=local, **{**kwargs, KEEP_CUT: True})
        aux_part = out.loss + out.log_probs.sum() / self._divisor(out.label_mask, kwargs)
        for name in PER_TOKEN:
            if getattr(out, name) is not None:
                setattr(out, name, self._gather(getattr(out, name))[:, : length - 1])
        out.loss = aux_part - out.log_probs.sum() / self._divisor(out.label_mask, kwargs)
        return out

    def _local_labels(self, labels: Tensor) -> Tensor:
        """``[B, s]``: at each position of this rank's slice the label of the next position."""
        size, rank = self.boundary.place
        whole = padded_length(labels.shape[1], size, self.boundary.least_slice)
        shifted = F.pad(labels[:, 1:], (0, whole - labels.shape[1] + 1), value=IGNORED)
        return shifted.chunk(size, dim=1)[rank]

    def _gather(self, x_Bs: Tensor) -> Tensor:
        group: ProcessGroup = self.boundary.group
        if x_Bs.is_floating_point():
            return gather_sequence(x_Bs, group)
        return gather_plain(x_Bs.byte(), group).to(x_Bs.dtype)  # gloo gathers no bool

    def _divisor(self, mask: Tensor, kwargs: dict[str, Any]) -> Any:
        items = kwargs.get("num_items_in_batch")
        return mask.sum().clamp(min=1) if items is None else items


def install_sharded_head(model: nn.Module) -> None:
    """Cut the fused LM head of a context-parallel model, unless it is.

    Raises:
        ValueError: the model has no fused head, or is not cut; ``HiddenCode`` where a decorator hides which.
    """
    model = getattr(model, "get_base_model", lambda: model)()  # PEFT's wrapper
    forward = model.__dict__.get("forward")
    if isinstance(forward, CutHead):
        return
    asked = "whether it has TRL's fused LM head"
    wrappers = [] if forward is None else functions_of(forward, f"{type(model).__name__}.forward", asked)
    fused = any("fused_lm_head" in wrapper.__code__.co_varnames for wrapper in wrappers)
    boundaries = [base.forward for base in text_models(model) if isinstance(base.__dict__.get("forward"), CutForward)]
    if not fused or not boundaries:
        raise ValueError(
            "cp_sharded_loss=True needs the fused LM head of TRL's SFTTrainer and cp_size > 1, but the model has "
            f"{'no cut forward' if not boundaries else 'no fused LM head'}. Leave cp_sharded_loss False."
        )
    model.forward = CutHead(forward, boundaries[0])  # type: ignore[arg-type,assignment]
