"""The images of a batch's first samples: their tensors are not one row a sample, so the collator's rows are counted.

B samples, m rows a sample (2 where a batch is chosen and rejected, each with the sample's images), N images in all.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

PER_SAMPLE = "images_per_sample"
"""Key of a batch ``[B]``, int64: how many images each sample has. It never reaches the model."""
_PREFIXES = ("pixel_values", "image_", "video_")


def note_images(batch: Any, samples: Sequence[Any]) -> None:
    """Add :data:`PER_SAMPLE` to a batch that has images, in place, where its samples have a column ``images``."""
    if not isinstance(batch, MutableMapping) or batch.get("pixel_values") is None:
        return
    if all(isinstance(sample, Mapping) and isinstance(sample.get("images"), Sequence) for sample in samples):
        batch[PER_SAMPLE] = torch.tensor([len(sample["images"]) for sample in samples])


def is_of_images(name: str) -> bool:
    """Whether a batch's tensor of this name describes images, not rows of tokens."""
    return name.startswith(_PREFIXES)


def images_of_first(tensors: dict[str, Tensor], per_sample_B: Tensor | None, count: int) -> dict[str, Tensor] | None:
    """What the first ``count`` samples have of these tensors.

    Args:
        tensors: those of images, by name: one row an image ``[N, ...]``, or one row a patch, as ``image_grid_thw``
            has them.
        per_sample_B: how many images each sample has.
        count: samples to keep.

    Returns:
        the tensors cut, empty where no image is left; None where a tensor is neither.
    """
    if not tensors:
        return {}
    if per_sample_B is None or not int(per_sample_B.sum()):
        return None
    total = next((len(t) for name, t in tensors.items() if name in ("image_grid_thw", "image_position_ids")), None)
    per_sample = per_sample_B.tolist()
    if total is None or total % sum(per_sample):
        return None
    kept = [sample < count for sample, number in enumerate(per_sample) for _ in range(number)]
    keep_N = torch.tensor(kept * (total // len(kept)))
    grid = tensors.get("image_grid_thw")
    patches_N = None if grid is None else grid.prod(dim=1).cpu()
    found = {}
    for name, tensor in tensors.items():
        if len(tensor) == total:
            rows = keep_N
        elif patches_N is not None and len(tensor) == int(patches_N.sum()):
            rows = keep_N.repeat_interleave(patches_N)
        else:
            return None
        found[name] = tensor[rows.to(tensor.device)]
    return found if bool(keep_N.any()) else {}
