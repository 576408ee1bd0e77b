"""Experts that image tokens alone reach (ERNIE-4.5-VL's ``vision_moe``): every rank calls them, if with no rows.

Their exchange is a collective of every layer, which the model's own code leaves out for a batch without images. A rank
without sends no rows, and computes those of the others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

TEXT, VISION = "text_moe", "vision_moe"


class CalledByAll:
    """Callable in place of a block's ``forward``.

    Args:
        block: has one set of experts for text tokens and one for those of images.

    Attributes:
        ran: whether a token of this rank reached the latter in the last call.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block, self.forward = block, block.forward
        self.ran = False
        block.get_submodule(VISION).register_forward_pre_hook(self._saw)

    def _saw(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.ran = True

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``hidden_states [B, S, D]`` and the tokens' kinds -> what the block returns."""
        self.ran = False
        output, *others = self.forward(hidden_states, *args, **kwargs)
        if self.ran:
            return (output, *others)
        nothing, _ = self.block.get_submodule(VISION)(hidden_states.flatten(0, -2)[:0])
        self.ran = False
        return (output + nothing.sum(), *others)  # a sum over no rows: backward goes through their exchange, adding 0


def call_by_all(model: nn.Module) -> list[nn.Module]:
    """Make every rank call them, in place; returns these experts, whose ``TowerUse`` is the caller's to watch."""
    found = []
    for block in list(model.modules()):
        if {TEXT, VISION} <= {name for name, _ in block.named_children()}:
            block.forward = CalledByAll(block)  # type: ignore[assignment]
            found.append(block)
    return found
