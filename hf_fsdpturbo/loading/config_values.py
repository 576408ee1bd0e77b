"""Values of a model's config that no model can have, found before one is built from them.

A config is small and what it asks for is not: a thousand million layers are built until memory ends. So numbers that
ask for much are compared with what the files hold, and numbers that only spoil the results are refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterator, Mapping
from typing import Any

from hf_fsdpturbo.bounded import DATA_BYTES, cut, parse_json, read_text
from hf_fsdpturbo.checkpoint.inside import check_link
from hf_fsdpturbo.expert_stacks import COUNTS

CONFIG = "config.json"
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")
EXPERTS = (*COUNTS, "moe_num_routed_experts", "n_experts")
MANY = 256
"""More layers than any released model has; up to so many are built in seconds, and what is missing is named then."""
MANY_EXPERTS = 4096
_INTEGERS = ("BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")


def raw_config(folder: str) -> dict[str, Any] | None:
    """``config.json`` of a folder as it is written; None where there is none.

    Raises:
        ValueError: not a JSON mapping, or nested too deep; names the file.
    """
    path = os.path.join(folder, CONFIG)
    if not os.path.isfile(path):
        return None
    check_link(folder, path)
    content = parse_json(read_text(path, DATA_BYTES), path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a mapping, but it is {cut(content)}. Copy the file again.")
    return content


def asks_for_much(config: Mapping[str, Any]) -> bool:
    """Whether some count is larger than those of released models."""
    return any(
        isinstance(value, int) and value > (MANY if key in LAYERS else MANY_EXPERTS)
        for _, key, value in _fields(config)
        if key in LAYERS or key in EXPERTS
    )


def check_counts(path: str, config: Mapping[str, Any], headers: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the counts of layers and experts with what the files hold.

    Args:
        path: of the config, for messages.
        config: as it is written.
        headers: of all weight files; empty where they are in another format.

    Raises:
        ValueError: more layers than tensors, or more experts than tensors and rows.
    """
    shapes = [entry["shape"] for header in headers.values() for entry in header.values()]
    rows = max((shape[0] for shape in shapes if shape), default=0)
    for name, key, value in _fields(config):
        if not isinstance(value, int) or isinstance(value, bool) or not (key in LAYERS or key in EXPERTS):
            continue
        if value < 0:
            raise ValueError(f"{path}: {name}={cut(value)} is negative. Copy the file again.")
        most = len(shapes) if key in LAYERS else max(len(shapes), rows)
        if shapes and value > most:
            held = f"{len(shapes)} tensors" + ("" if key in LAYERS else f" of at most {rows} rows")
            raise ValueError(
                f"{path}: {name}={cut(value)}, but the checkpoint's files hold {held} in all. Use the model's own "
                "config and checkpoint."
            )
        if not shapes and value > 100_000:
            raise ValueError(f"{path}: {name}={cut(value)}, which no model has. Copy the file again.")


def check_dtypes(
    folder: str, config: Mapping[str, Any], headers: Mapping[str, Mapping[str, Any]], used: Container[str]
) -> None:
    """Refuse quantised weights that no ``quantization_config`` explains: as plain numbers they would be loaded wrong.

    Args:
        folder: of the files, for messages.
        config: of the model.
        headers: of all files.
        used: keys that the model has a place for; others are carried as they are.

    Raises:
        ValueError: naming file, key and dtype.
    """
    if any(block.get("quantization_config") is not None for _, block in _blocks(config)):
        return
    for file, header in headers.items():
        for key, entry in header.items():
            dtype = str(entry["dtype"])
            coded = dtype.startswith(("F8", "F6", "F4")) or dtype in ("I8", "U8")
            counted = dtype in _INTEGERS and key.endswith(("weight", "proj"))
            if key in used and ((coded and len(entry["shape"]) > 1) or counted):
                raise ValueError(
                    f"{os.path.join(folder, file)}: {cut(key)[1:-1]} has dtype {dtype}, and {CONFIG} has no "
                    "quantization_config that says what it means. Use the checkpoint's own config.json."
                )


def check_values(what: str, config: Mapping[str, Any]) -> None:
    """Refuse values with which every result would be wrong.

    Args:
        what: the config, in words.
        config: its fields; those of the configs inside it are looked at too.

    Raises:
        ValueError: NaN; an epsilon that is negative, infinite or over 1; a dropout outside 0 to 1; more experts a
            token than there are experts. Names field and value.
    """
    for name, key, value in _fields(config):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value != value:
            raise ValueError(f"{what}: {name} is NaN. Copy the config again.")
        if key.rpartition("_")[2] in ("eps", "epsilon") and not 0 <= value <= 1:
            raise ValueError(f"{what}: {name}={cut(value)} must be between 0 and 1. Copy the config again.")
        if "dropout" in key and not 0 <= value <= 1:
            raise ValueError(f"{what}: {name}={cut(value)} must be between 0 and 1: it is a share. Correct it.")
        if key == "initializer_range" and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{what}: {name}={cut(value)} must be a finite number. Copy the config again.")
    for name, block in _blocks(config):
        held = next((block[key] for key in EXPERTS if _count(block.get(key))), None)
        for key in TOP_K:
            value = block.get(key)
            if held is not None and isinstance(value, int) and not 0 <= value <= held:
                raise ValueError(
                    f"{what}: {name}{key}={cut(value)} must be at most the number of experts, {held}. Use the model's "
                    "own config."
                )


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _blocks(config: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name with a dot after it, mapping) of a config and the configs inside it."""
    yield name, config
    for key, value in config.items():
        if isinstance(value, Mapping) and len(name) < 200:
            yield from _blocks(value, f"{name}{key}.")


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(full name, own name, value)."""
    for name, block in _blocks(config):
        for key, value in block.items():
            yield f"{name}{key}", str(key), value
