"""``topology.json``: what wrote a checkpoint, and the checks that a resuming run belongs to it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from hf_fsdpturbo import compat
from hf_fsdpturbo.checkpoint.commit import read_json
from hf_fsdpturbo.expert_stacks import COUNTS
from hf_fsdpturbo.ranks import world_size

TOPOLOGY_JSON = "topology.json"
FORMAT = 1
FIELDS = {"format", "topology", "model_type", "model_class", "num_experts", "hub_conversions"}
"""What a reader needs."""


def num_experts(model: nn.Module) -> int | None:
    """Number of routed experts the model's config names, None for a dense model."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((n for field in COUNTS if isinstance(n := getattr(config, field, None), int)), None)


def model_type(model: nn.Module) -> str:
    """``config.model_type``, or the class's name for a model without a config."""
    kind: str | None = getattr(getattr(model, "config", None), "model_type", None)
    return kind or type(model).__name__.removeprefix("FSDP")


def hub_conversions(model: nn.Module) -> list[list[Any]] | None:
    """The weight conversions a model was loaded through, as (class, patterns in the files, patterns in the model).

    None for a model that was not loaded: it is exported under its family's default names.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        return None
    return [conversion_key(conversion) for conversion in conversions]


def conversion_key(conversion: Any) -> list[Any]:
    """What identifies one of Transformers' conversions between two processes."""
    return [
        type(conversion).__name__,
        list(conversion._original_source_patterns),
        list(conversion._original_target_patterns),
    ]


def describe(model: nn.Module, topology: dict[str, int] | None, weights: str = "dcp") -> dict[str, Any]:
    """Content of ``topology.json``: sizes, versions, model type, number of experts, conversions, where weights lie."""
    packages = ("torch", "transformers", "accelerate", "trl")
    return {
        "format": FORMAT,
        "weights": weights,
        "world_size": world_size(),
        "topology": topology,
        "versions": {name: str(compat.installed_version(name)) for name in packages},
        "model_type": model_type(model),
        "model_class": type(model).__name__.removeprefix("FSDP"),
        "num_experts": num_experts(model),
        "hub_conversions": hub_conversions(model),
        "dtype": str(next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)),
    }


def read(directory: str) -> dict[str, Any]:
    """``topology.json`` of a checkpoint.

    Raises:
        ValueError: missing, damaged, or of a newer format; names the file.
    """
    path = os.path.join(directory, TOPOLOGY_JSON)
    facts = read_json(path)
    if not isinstance(facts, dict) or not FIELDS <= set(facts):
        lacking = sorted(FIELDS - set(facts)) if isinstance(facts, dict) else sorted(FIELDS)
        raise ValueError(f"{path} is damaged: it lacks {lacking}. Copy the file again, or choose another checkpoint.")
    if facts.get("format") != FORMAT:
        found = facts.get("format")
        raise ValueError(f"{path} has format {found}, this release reads {FORMAT}: use the release that wrote it.")
    return facts


def check_same_model(directory: str, facts: dict[str, Any], model: nn.Module) -> None:
    """Refuse a foreign checkpoint by what a person would look at first; names and shapes are compared later.

    Raises:
        ValueError: another model type or number of experts; names the file and both values.
    """
    path = os.path.join(directory, TOPOLOGY_JSON)
    for field, mine in (("model_type", model_type(model)), ("num_experts", num_experts(model))):
        if facts[field] != mine:
            raise ValueError(
                f"{path}: the checkpoint is of a model with {field}={facts[field]}, this model has {field}={mine}. "
                "Resume with the model that was trained."
            )
