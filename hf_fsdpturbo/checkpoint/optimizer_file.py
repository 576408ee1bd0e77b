"""``optimizer.json`` of a checkpoint against the optimizer that takes its hyperparameters: all of them, in kind."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from hf_fsdpturbo.bounded import cut
from hf_fsdpturbo.checkpoint.commit import read_json

_RUN_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable", "maximize")
"""How an optimizer runs, not what it computes: these stay as the new run has them."""


def check_optimizer_file(path: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a file that the optimizer would only fail on in its first step.

    Raises:
        ValueError: no groups of named parameters, or a hyperparameter that is missing or of another kind; names the
            file and the hyperparameter.
    """
    content = read_json(path)
    again = "Copy the file again, or choose another checkpoint."
    if not isinstance(content, dict) or not isinstance(content.get("class"), str):
        raise ValueError(f"{path} names no optimizer class. {again}")
    groups = content.get("groups")
    if not isinstance(groups, list) or not groups or not all(_names_parameters(group) for group in groups):
        raise ValueError(f"{path} has no groups of named parameters. {again}")
    if not isinstance(content.get("plain_state"), dict):
        raise ValueError(f"{path} has no plain_state. {again}")
    if content["class"] != type(optimizer).__name__:
        return  # said better by who compares the classes
    for key, value in optimizer.param_groups[0].items():
        for group in () if key in _RUN_OPTIONS else groups:
            if key not in group:
                raise ValueError(f"{path}: a group lacks {key}. {again}")
            if not _fits(group[key], value):
                raise ValueError(f"{path}: {key}={cut(group[key])} is not of the kind of {cut(value)}. {again}")


def _names_parameters(group: Any) -> bool:
    names = group.get("params") if isinstance(group, dict) else None
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _fits(saved: Any, own: Any) -> bool:
    if isinstance(own, bool) or isinstance(saved, bool):
        return isinstance(own, bool) and isinstance(saved, bool)
    if isinstance(own, tuple | list):
        return isinstance(saved, Collection) and len(saved) == len(own) and all(map(_fits, saved, own))
    if isinstance(own, int | float | torch.Tensor):
        return isinstance(saved, int | float) and math.isfinite(saved)
    return own is None or type(saved) is type(own)
