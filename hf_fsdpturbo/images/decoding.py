"""Pictures are decoded where a batch is made of them, not by ``datasets``, whose errors name neither row nor file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_fsdpturbo.images.bad_rows import COLUMNS, name_of, unreadable

Decoders = Mapping[str, Callable[[Any], Any]]
"""What reads a stored picture, by column."""


def undecoded(data: Any) -> tuple[Any, dict[str, Callable[[Any], Any]]]:
    """A map-style data set whose pictures come as stored, and what decodes each of its columns as ``datasets`` would.

    Args:
        data: any data set; of a ``datasets.Dataset`` with a column of images the samples know their rows. One with a
            format or a transform of the user's decodes its pictures itself, and others stay as they are.
    """
    features = getattr(data, "features", None)
    decoders: dict[str, Callable[[Any], Any]] = {}
    if not isinstance(features, Mapping) or not hasattr(data, "__getitems__") or not features.keys() & set(COLUMNS):
        return data, decoders
    from datasets import Image, List

    from hf_fsdpturbo.images.numbered import numbered

    for name in COLUMNS if data.format["type"] is None else ():
        feature = features.get(name)
        inner = feature.feature if isinstance(feature, List) else feature
        if isinstance(inner, Image) and inner.decode:
            stored = Image(mode=inner.mode, decode=False)
            data = data.cast_column(name, List(stored, feature.length) if isinstance(feature, List) else stored)
            decoders[name] = inner.decode_example
    return numbered(data), decoders


def decode(samples: Sequence[Any], decoders: Decoders, where: str) -> None:
    """Decode the pictures of samples, in place.

    Raises:
        ValueError: naming the data set (``where``), row, column and file.
    """
    for sample in samples:
        for column, read in decoders.items():
            value = sample.get(column)
            place = place_of(sample, column, where)
            if isinstance(value, list):
                sample[column] = [_read(image, read, f"{place}, image {i}") for i, image in enumerate(value)]
            elif value is not None:
                sample[column] = _read(value, read, place)


def place_of(sample: Any, column: str, where: str) -> str:
    """Where a sample's pictures stand, for messages; its row where that is known."""
    row = getattr(sample, "row", None)
    return f"{where}: {'a row' if row is None else f'row {row}'}, column {column!r}"


def _read(image: Any, read: Callable[[Any], Any], place: str) -> Any:
    if not isinstance(image, Mapping):
        return image
    try:
        return read(image)
    except unreadable() as error:
        raise ValueError(f"{place}: {name_of(image)} cannot be read ({error}). Replace it.") from error
