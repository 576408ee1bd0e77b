"""Rows whose images cannot be had, or whose text asks for another number of them: found before the model is loaded.

Each rank looks at a share of the rows: at the file or the bytes of each picture as far as its header, which costs
little and tells what is missing and what is no picture. A picture that breaks off later is met when it is read
(decoding.py and bad_batches.py name it; the watcher says it on every rank).
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from typing import Any

from transformers.trainer_utils import has_length

COLUMNS = ("image", "images")  # TRL's
LOOKED_AT = 5_000
"""Rows a rank looks at."""


def check_pictures(where: str, data: Any, rank: int, world_size: int, placeholders: Callable[..., Any] | None) -> None:
    """Look at this rank's share of the rows of a map-style data set; of a stream nothing is known ahead.

    Args:
        where: the data set, for messages.
        data: it.
        rank: this rank's place.
        world_size: ranks that look.
        placeholders: called with a conversation and ``images=`` its images, raises ValueError where their numbers
            differ (TRL's ``prepare_multimodal_messages``); None looks at pictures only.

    Raises:
        ValueError: naming the data set, the row, the column and the file.
    """
    features = getattr(data, "features", None)
    if not isinstance(features, Mapping) or not has_length(data) or not hasattr(data, "with_format"):
        return
    column = next((name for name in COLUMNS if name in features), None)
    if column is None:
        return
    text = next((name for name in ("messages", "prompt") if name in features), None)
    table = data.select_columns([name for name in (column, text) if name is not None]).with_format("arrow")
    for row in range(rank, min(len(data), LOOKED_AT * world_size), world_size):
        values = table[row].to_pylist()[0]
        place = f"{where}: row {row}, column {column!r}"
        images = _images(values[column], column, place)
        for number, image in enumerate(images):
            _look_at(image, f"{place}, image {number}" if column == "images" else place)
        if placeholders is not None and text is not None and isinstance(values[text], list):
            try:
                placeholders(values[text], images=[object()] * len(images))
            except ValueError as error:
                raise ValueError(
                    f"{place} and column {text!r}: {error} Give as many images as the text has places for; plain text "
                    "gets its places by itself, before the first user message."
                ) from error


def _images(value: Any, column: str, place: str) -> list[Any]:
    if value is None and column == "images":
        return []
    if value is None:
        fix = "a column 'images' with an empty list"
        raise ValueError(f"{place}: there is no value (null). A row without images has {fix}.")
    return value if column == "images" and isinstance(value, list) else [value]


def name_of(image: Mapping[str, Any]) -> str:
    """What to call a stored picture."""
    path = image.get("path")
    return f"file {path}" if path else f"a picture of {len(image.get('bytes') or b'')} bytes without a name"


def unreadable() -> tuple[type[Exception], ...]:
    """What PIL raises on bad files."""
    from PIL import Image

    return OSError, ValueError, SyntaxError, Image.DecompressionBombError


def _look_at(image: Any, place: str) -> None:
    """A picture as Arrow stores it: a path, or a mapping of ``path`` and ``bytes``; the rest is for the processor."""
    if isinstance(image, str):
        image = {"path": image}
    if not isinstance(image, Mapping) or not image.keys() & {"path", "bytes"}:
        if image is None:
            raise ValueError(f"{place}: there is no picture (null). Leave it out of the list.")
        return
    path, content = image.get("path") or "", image.get("bytes")
    name = name_of(image)
    source: Any = path
    if content is not None:
        source = io.BytesIO(content)
    elif not path:
        raise ValueError(f"{place}: it has neither a path nor bytes. Give one, or leave it out of the list.")
    elif "://" in path or path.startswith("data:"):
        return
    elif not os.path.exists(path):
        raise ValueError(f"{place}: {name} does not exist. Correct the path, or drop the row.")
    from PIL import Image

    try:
        with Image.open(source):
            pass
    except unreadable() as error:
        raise ValueError(f"{place}: {name} is no picture that can be read ({error}). Replace it.") from error
