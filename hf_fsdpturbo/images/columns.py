"""Whether batches of a run may have images: by the columns of its data sets, before the model is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers.trainer_utils import has_length

IMAGE_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "image_sizes",
    "input_features",
)
"""What processors call what a tower reads, in a batch or in a prepared data set."""
COLUMNS = ("image", "images", *IMAGE_KEYS)
"""TRL's collators for images look for the first two."""


def may_have_images(datasets: Iterable[Any], data_collator: Any) -> bool:
    """Whether some batch may have images.

    Args:
        datasets: training and evaluation sets, mappings of them, or None.
        data_collator: the user's; what it makes of rows is not known.

    Returns:
        True where that is known, or cannot be known.
    """
    parts = [part for data in datasets for part in (data.values() if _is_several(data) else [data])]
    return data_collator is not None or any(set(_columns(part)) & set(COLUMNS) for part in parts)


def _is_several(data: Any) -> bool:
    return isinstance(data, Mapping) and not hasattr(data, "column_names") or type(data).__name__ == "DatasetDict"


def _columns(data: Any) -> Iterable[str]:
    """Names of the columns; a data set that does not know them is asked for a sample, as TRL does."""
    names = getattr(data, "column_names", None)
    if isinstance(names, list):
        return names
    sample = None
    if hasattr(data, "__iter__") and not isinstance(data, str):
        sample = next(iter(data), None)
    elif has_length(data) and len(data) and hasattr(data, "__getitem__"):
        sample = data[0]
    return list(sample) if isinstance(sample, Mapping) else []
