"""Task heads that a checkpoint does not have: drawn as one process draws them, equal on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from hf_fsdpturbo import ranks
from hf_fsdpturbo.shards import copy_full_tensor_

FRESH_HEADS = ("score.", "classifier.")
"""Task heads that a base checkpoint does not have: they start fresh, equal on all ranks. The rest must be there."""
REPLACED_HEAD = "lm_head."
"""The head of a base checkpoint, which a fresh task head takes the place of."""


@contextlib.contextmanager
def same_random_state(device: torch.device) -> Iterator[None]:
    """Random states of CPU and device are afterwards what they were: a fresh head must be drawn as in a plain load."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        with torch.random.fork_rng(devices=[index], device_type=device.type):
            yield


def share_random_state() -> None:
    """All ranks go on with rank 0's CPU random state: it alone has drawn what a checkpoint lacks. Collective.

    Adapters are drawn next: from states that differ, slices of different draws would be put together.
    """
    torch.set_rng_state(ranks.from_rank0(torch.get_rng_state()))


def draw_heads_whole(model: nn.Module) -> None:
    """Make Transformers initialise a fresh task head as one process does: every rank draws it whole, keeps its slice.

    Left alone, each rank draws its own shard: a head that differs from one process's, and from rank to rank where it
    is replicated. Undo with ``del model._init_weights``.
    """
    own = cast(Any, model)._init_weights
    heads = {module for name, module in model.named_modules() if f"{name}.".startswith(FRESH_HEADS)}

    def init_weights(module: nn.Module) -> None:
        own_parameters = dict(module.named_parameters(recurse=False)) if module in heads else {}
        fresh = {n: p for n, p in own_parameters.items() if not getattr(p, "_is_hf_initialized", False)}
        for name, parameter in fresh.items():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            module._parameters[name] = nn.Parameter(whole, requires_grad=False)
        own(module)
        for name, parameter in fresh.items():
            copy_full_tensor_(parameter, module.get_parameter(name))
            module._parameters[name] = parameter

    cast(Any, model)._init_weights = init_weights


def report_fresh_heads(path: str, keys: list[str]) -> None:
    """Say once, on rank 0, which head starts fresh."""
    if keys and ranks.rank() == 0:
        print(f"[hf_fsdpturbo] {path} has no {', '.join(keys)}: drawn at random, equal on all ranks.", flush=True)
