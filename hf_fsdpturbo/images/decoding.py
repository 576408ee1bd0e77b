"""Pictures are decoded where a batch is made of them, not by ``datasets``, whose errors do not name the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_fsdpturbo.images.bad_rows import COLUMNS, name_of


def undecoded(data: Any) -> tuple[Any, dict[str, Callable[[Any], Any]]]:
    """A map-style data set whose pictures come as stored, and what decodes each of its columns as ``datasets`` would.

    Args:
        data: any data set; others than ``datasets.Dataset`` with columns of images, and those with a format or a
            transform of the user's, stay as they are.
    """
    features = getattr(data, "features", None)
    decoders: dict[str, Callable[[Any], Any]] = {}
    if not isinstance(features, Mapping) or not hasattr(data, "__getitems__") or data.format["type"] is not None:
        return data, decoders
    from datasets import Image, List

    for name in COLUMNS:
        feature = features.get(name)
        inner = feature.feature if isinstance(feature, List) else feature
        if isinstance(inner, Image) and inner.decode:
            stored = Image(mode=inner.mode, decode=False)
            data = data.cast_column(name, List(stored) if isinstance(feature, List) else stored)
            decoders[name] = inner.decode_example
    return data, decoders


def decode(samples: Sequence[Any], decoders: Mapping[str, Callable[[Any], Any]]) -> None:
    """Decode the pictures of samples, in place.

    Raises:
        ValueError: naming column and file.
    """
    for sample in samples:
        for column, read in decoders.items():
            value = sample.get(column)
            if isinstance(value, list):
                sample[column] = [_read(image, read, column) for image in value]
            elif value is not None:
                sample[column] = _read(value, read, column)


def _read(image: Any, read: Callable[[Any], Any], column: str) -> Any:
    if not isinstance(image, Mapping):
        return image
    try:
        return read(image)
    except (OSError, ValueError, SyntaxError) as error:  # what PIL raises on bad files
        raise ValueError(f"column {column!r}: {name_of(image)} cannot be read ({error}). Replace it.") from error
