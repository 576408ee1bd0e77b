"""Tokens of images told from those of text: how many there are, and what the experts of each layer get of either.

The counter of all tokens runs once more with other weights: 1 where the token stands for a part of an image.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_fsdpturbo.images import tower_use
from hf_fsdpturbo.telemetry.expert_counts import ExpertCounts
from hf_fsdpturbo.telemetry.real_tokens import RealTokens


class ImageTokens(RealTokens):
    """``RealTokens`` whose rows are those of images; rows that cannot be told from others are none.

    Args:
        device: where totals are kept.
        token_id: what stands for images in ``input_ids``.
    """

    def __init__(self, device: torch.device, token_id: int) -> None:
        super().__init__(device)
        self.token_id = token_id

    def weights(self, rows: int, token_of_row: Tensor | None = None) -> Tensor | None:
        found = super().weights(rows, token_of_row)
        return torch.zeros(rows, dtype=torch.bool, device=self.totals.device) if found is None else found

    def _saw_model(self, module: nn.Module, given: dict[str, Any]) -> None:
        ids_BS = given.get("input_ids")
        self._outer_mask = None if ids_BS is None else ids_BS == self.token_id

    def _mask(self, given: dict[str, Any], tokens: Tensor) -> Tensor | None:
        mask_BS = super()._mask({}, tokens)
        return torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask_BS is None else mask_BS

    def _count_keys(self, *_: Any) -> None:
        pass


class ImageLoad:
    """What one model's experts get of images.

    Args:
        model: as it trains.
        device: where counts are kept.
        token_id: as :class:`ImageTokens`.
    """

    def __init__(self, model: nn.Module, device: torch.device, token_id: int) -> None:
        self.tokens = ImageTokens(device, token_id)
        self.counts = ExpertCounts(model, self.tokens, device)
        self._reader, self._before = self.counts.reader(), torch.zeros(1, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, model: Any, device: torch.device) -> ImageLoad | None:
        """None where no batch may have images, or a config does not say which token stands for them."""
        token = getattr(getattr(model, "config", None), "image_token_id", None)
        return cls(model, device, token) if isinstance(token, int) and tower_use(model) is not None else None

    def attach(self, model: nn.Module) -> list[Any]:
        """Count from now on; returns handles that end it."""
        return [*self.tokens.attach(model), *self.counts.attach()]

    def local(self) -> Tensor:
        """This rank's since the last call, int64 ``[N + 1]``: counts of all layers, then tokens."""
        now = self.tokens.totals[:1].clone()
        since, self._before = now - self._before, now
        return torch.cat([self._reader.local(), since])

    def metrics(self, summed: list[int], counts: dict[str, np.ndarray], tokens: int) -> dict[str, float]:
        """Of a window.

        Args:
            summed: :meth:`local` over all ranks.
            counts: ``[E]`` by layer, of all tokens.
            tokens: all of them.
        """
        *image_N, images = summed
        of_images = {name: found.numpy() for name, found in self.counts.by_layer(torch.tensor(image_N)).items()}
        of_text = {name: count - of_images[name] for name, count in counts.items()}
        found = {"image_token_share": images / max(tokens, 1)}
        for kind, load in (("images", of_images), ("text", of_text)):
            worst = [count.max() * len(count) / count.sum() for count in load.values() if count.sum()]
            if images and worst:
                found[f"experts/load_max_over_mean_{kind}"] = float(max(worst))
        return found
