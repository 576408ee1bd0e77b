"""Batches that cannot be made, or whose texts have other places for images than they need: which row it is.

R rows of a batch: m times its B samples (m = 2 where chosen and rejected), each time with the samples' images.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.images.bad_rows import COLUMNS, name_of
from hf_fsdpturbo.images.decoding import Decoders, decode, place_of

_REFUSALS = (OSError, ValueError, SyntaxError, TypeError, IndexError, KeyError)
"""What collators and processors raise on a row that they cannot take."""


@dataclass(frozen=True)
class ImageTokens:
    """What a model's config says of the tokens that stand for images.

    Attributes:
        token_id: of the places in a text.
        merged: patches of an image that make one token.
    """

    token_id: int
    merged: int

    @classmethod
    def of(cls, config: Any) -> ImageTokens | None:
        """None where a config does not say it so (not all families count patches)."""
        token = getattr(config, "image_token_id", None)
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
        return cls(token, merge**2) if isinstance(token, int) and isinstance(merge, int) else None


class NamedRows:
    """A collator whose errors name the row, where its samples have pictures.

    Args:
        collate: the trainer's own.
        decoders: of columns that the data set leaves undecoded.
        where: the data set, for messages.
        tokens: None: places for images are not counted.
    """

    def __init__(self, collate: Any, decoders: Decoders, where: str, tokens: ImageTokens | None) -> None:
        self.collate, self.decoders, self.where, self.tokens = collate, decoders, where, tokens

    def __call__(self, samples: Any) -> Any:
        """The batch of ``collate``.

        Raises:
            ValueError: naming data set, row, column and file.
        """
        if not any(isinstance(sample, Mapping) and sample.keys() & set(COLUMNS) for sample in samples):
            return self.collate(samples)
        stored = [copy.copy(sample) for sample in samples]  # collators change samples in place
        try:
            batch = self._make(samples)
        except _REFUSALS as error:
            self._name(stored, error)
            raise
        if self.tokens is not None and isinstance(batch, Mapping):
            self._count_places(batch, stored, self.tokens)
        return batch

    def _make(self, samples: Any) -> Any:
        for sample in samples:
            if sample.get("images", ()) is None:  # no images: TRL's collators take an empty list, in all formats
                sample["images"] = []
        decode(samples, self.decoders, self.where)
        return self.collate(samples)

    def _name(self, stored: Sequence[Any], error: Exception) -> None:
        """Raise for the first row that fails alone; not where all rows do, whose fault it then hardly is."""
        alone = [self._refusal(sample) for sample in stored]
        found = next(((s, e) for s, e in zip(stored, alone, strict=True) if e is not None), None)
        if found is None or (len(stored) > 1 and len({str(e) for e in alone}) == 1):
            return
        sample, refusal = found
        place = self._place(sample)
        if str(refusal).startswith(f"{self.where}: "):  # decoding has named it
            raise refusal
        said = f"{refusal}" if isinstance(refusal, ValueError) else f"{type(refusal).__name__} ({refusal})"
        raise ValueError(f"{place}: {said}") from refusal

    def _refusal(self, sample: Any) -> Exception | None:
        try:
            self._make([copy.copy(sample)])
        except _REFUSALS as error:
            return error
        return None

    def _count_places(self, batch: Mapping[str, Any], stored: Sequence[Any], tokens: ImageTokens) -> None:
        ids_RS, grid_N3 = batch.get("input_ids"), batch.get("image_grid_thw")
        per_sample = [len(_pictures(sample)[1]) for sample in stored]
        if not isinstance(ids_RS, Tensor) or ids_RS.ndim != 2 or not per_sample or len(ids_RS) % len(per_sample):
            return
        repeats = len(ids_RS) // len(per_sample)
        per_row = torch.tensor(per_sample * repeats)
        needs_N = torch.zeros(0) if grid_N3 is None else grid_N3.prod(dim=1).cpu() // tokens.merged
        if len(needs_N) != int(per_row.sum()):
            return
        needs_R = torch.stack([part.sum() for part in needs_N.split(per_row.tolist())])
        places_R = (ids_RS == tokens.token_id).sum(dim=1).cpu()
        if bool((needs_R != places_R).any()):
            row = int((needs_R != places_R).nonzero()[0])
            raise ValueError(
                f"{self._place(stored[row % len(stored)])}: its images make {int(needs_R[row])} tokens, and its text "
                f"has {int(places_R[row])} places for them. Give as many images as the text has places for, and "
                "max_length=None: what is cut off a text may be places of an image."
            )

    def _place(self, sample: Any) -> str:
        column, images = _pictures(sample)
        names = [name_of(image) for image in images if isinstance(image, Mapping)]
        names += [f"file {image}" for image in images if isinstance(image, str)]
        return place_of(sample, column, self.where) + (f" ({', '.join(names)})" if names else "")


def _pictures(sample: Any) -> tuple[str, list[Any]]:
    """The column of images, and a sample's."""
    column = next((name for name in COLUMNS if name in sample), "images")
    value = sample.get(column)
    return column, value if isinstance(value, list) else [] if value is None else [value]
