"""Small JSON files beside a model's weights: mappings, before Transformers reads them and says no file's name."""

from __future__ import annotations

import json
import os

from hf_fsdpturbo.bounded import DATA_BYTES, cut, read_text
from hf_fsdpturbo.checkpoint.commit import read_json

MAPPINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "adapter_config.json",
)
"""Not ``tokenizer.json``, which is large and has a reader of its own."""


def check_small_files(folder: str) -> None:
    """Look at those that are there; a key given twice is left to Transformers, as releases have such files.

    Raises:
        ValueError: no JSON mapping, too deep, or not UTF-8; names the file.
    """
    for path in (os.path.join(folder, name) for name in MAPPINGS):
        if not os.path.isfile(path):
            continue
        try:
            content = json.loads(read_text(path, DATA_BYTES))
        except RecursionError:
            raise ValueError(f"{path} has brackets inside brackets, too deep to read. Copy the file again.") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}. Copy the file again.") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} must hold a mapping, but it is {cut(content)}. Copy the file again.")


def weight_map(index: str) -> dict[str, str]:
    """Key -> name of the weight file that holds it, as the index at this path says; names are not yet looked at.

    Raises:
        ValueError: it has no such mapping; names the index.
    """
    content = read_json(index)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ValueError(f"{index} has no weight_map of keys to file names. Copy the file again.")
    return found
