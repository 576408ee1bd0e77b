"""What the aux loss asks of router logits, in plain PyTorch: how often experts are chosen, how probable they are.

Letters as in ``ops/table.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def router_load(logits_TE: Tensor, top_k: int, mask_T: Tensor | None, probs_TE: Tensor) -> Tensor:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    probs_TE.copy_(torch.softmax(logits_TE, -1, dtype=probs_TE.dtype))
    chosen_TE = torch.zeros_like(probs_TE, dtype=torch.float32)
    chosen_TE.scatter_(1, probs_TE.topk(top_k, -1).indices, 1.0)
    both_2TE = torch.stack((chosen_TE, probs_TE.float()))
    return (both_2TE if mask_T is None else both_2TE * mask_T.unsqueeze(1)).sum(1)


def router_load_backward(probs_NE: Tensor, slope_E: Tensor, mask_T: Tensor | None, out_NE: Tensor) -> None:
    """See :class:`hf_fsdpturbo.ops.table.OpSet`."""
    gradient_NE = slope_E.expand(probs_NE.shape)
    if mask_T is not None:
        gradient_NE = gradient_NE * mask_T.repeat(len(probs_NE) // max(len(mask_T), 1)).unsqueeze(1)
    wide_NE = probs_NE.to(torch.promote_types(probs_NE.dtype, torch.float32))
    out_NE.copy_(wide_NE * (gradient_NE - (gradient_NE * wide_NE).sum(-1, keepdim=True)))
