"""``RouterEntropy``: how undecided routers are: entropy of the probability that a token gives each expert, in nats.

T rows of a router, E experts. ``ln E`` where a router knows no difference, 0 where each token is sure of one expert.
The probabilities are the router's own: softmax of its logits, or sigmoids over their sum where it scores by sigmoid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_fsdpturbo.code_facts import HiddenCode, forward_of
from hf_fsdpturbo.telemetry.real_tokens import RealTokens, counts_now

SCALE = 2**20
"""Sums are kept in millionths of a nat or so, as int64: exact in any order, and they travel with counts."""
_CHOICE_OF_SCORE = ("scoring_func", "score_func", "score_function")


class RouterEntropy:
    """Sums over the routers of one model.

    Args:
        model: a Transformers model; where its family does not say which output holds router logits, there are none.
        tokens: which rows are real.
        device: where sums are kept.

    Attributes:
        routers: how many are watched.
        sums: int64 ``[2]`` on ``device``: entropy of this rank's tokens summed over routers, times ``SCALE``, and how
            many (token, router) pairs that is; they only grow.
    """

    def __init__(self, model: nn.Module, tokens: RealTokens, device: torch.device) -> None:
        self.tokens = tokens
        self.sums = torch.zeros(2, dtype=torch.int64, device=device)
        self._routers = _routers(model)
        self.routers = len(self._routers)

    def attach(self) -> list[Any]:
        """Watch from now on; returns handles that end it."""
        hooks = ((router, self._hook(index, _is_sigmoid(router))) for router, index in self._routers)
        return [router.register_forward_hook(hook) for router, hook in hooks]

    def _hook(self, index: int, is_sigmoid: bool) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            logits = output[index] if isinstance(output, tuple | list) else output
            if not isinstance(logits, Tensor) or not counts_now(module):
                return
            entropy_T = entropy(logits.detach().reshape(-1, logits.shape[-1]), is_sigmoid)
            real_T = self.tokens.weights(len(entropy_T))
            if real_T is not None:
                entropy_T = entropy_T * real_T
            self.sums[0] += (entropy_T.sum() * SCALE).to(torch.int64)
            self.sums[1] += len(entropy_T) if real_T is None else real_T.sum()

        return hook


def entropy(logits_TE: Tensor, is_sigmoid: bool = False) -> Tensor:
    """``[T]`` float32, in nats."""
    scores_TE = logits_TE.float()
    if is_sigmoid:
        scores_TE = scores_TE.sigmoid()
        scores_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    else:
        scores_TE = scores_TE.softmax(-1)
    return torch.special.entr(scores_TE).sum(-1)


def _routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Modules whose output holds router logits, with their place there, as Transformers records them."""
    declared: dict[type, int] = {}
    for module in model.modules():
        recorders = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits") or []
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            if isinstance(cls := getattr(recorder, "target_class", None), type):
                declared[cls] = getattr(recorder, "index", 0)
    classes = tuple(declared)
    return [
        (module, next(index for cls, index in declared.items() if isinstance(module, cls)))
        for module in model.modules()
        if isinstance(module, classes)
    ]


def _is_sigmoid(router: nn.Module) -> bool:
    """Read from the router's code; where it knows both, its config has chosen."""
    try:
        names = forward_of(router, "whether it scores by sigmoid").__code__.co_names
    except HiddenCode:
        return False
    chosen = {getattr(getattr(router, "config", router), field, None) for field in _CHOICE_OF_SCORE}
    return "sigmoid" in names and not ("softmax" in names and "softmax" in chosen)
