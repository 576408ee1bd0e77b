"""The learning-rate scheduler across topologies: its per-group lists follow the parameters, not the group's number.

Transformers makes one optimizer group a mesh and kind of decay, so one process has fewer groups than a sharded run.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_fsdpturbo.checkpoint.dcp import parameter_names

NOT_BY_GROUP = ("_milestones", "milestones")  # steps of a chain, however many there are


def group_sources(
    saved_groups: list[dict[str, Any]], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[int]:
    """For each group of this run, the saved group that its first parameter was in (0 for an empty group)."""
    index_of = {name: index for index, group in enumerate(saved_groups) for name in group["params"]}
    names = parameter_names(model)
    return [index_of[names[group["params"][0]]] if group["params"] else 0 for group in optimizer.param_groups]


def follow_groups(state: Any, num_saved: int, sources: list[int]) -> Any:
    """A scheduler's state dict with every list of one entry a saved group rebuilt for this run's groups."""
    if not isinstance(state, dict):
        return state
    followed = {}
    for key, value in state.items():
        if key == "_schedulers":  # a chain of schedulers: one state dict each
            followed[key] = [follow_groups(inner, num_saved, sources) for inner in value]
        elif key not in NOT_BY_GROUP and isinstance(value, list) and len(value) == num_saved:
            followed[key] = [value[source] for source in sources]
        else:
            followed[key] = value
    return followed
