"""Task heads that a checkpoint does not have: drawn as one process draws them, equal on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdpturbo import ranks
from hf_fsdpturbo.shards import copy_full_tensor_

FRESH_HEADS = ("score.", "classifier.")
"""Task heads that a base checkpoint does not have: they start fresh, equal on all ranks. The rest must be there."""
DRAWN_IN_MEMORY = 2**16
"""Elements. Some families draw values of a tensor's size before they find that it is loaded (decay rates of Qwen3.5),
which moves the random state that adapters are drawn from next; on meta it would stay."""
REPLACED_HEADS = ("lm_head.", "embed_out.")
"""The head of a base checkpoint (GPT-NeoX's has its own name), which a fresh task head takes the place of."""


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
    is replicated. Loaded shards step aside: a family's code may do with a whole tensor what a shard does not take,
    before it finds that nothing is left to fill. Undo with :func:`initialise_as_usual`.
    """
    heads = {module for name, module in model.named_modules() if f"{name}.".startswith(FRESH_HEADS)}
    for part in _models_in(model):  # Transformers asks the model inside for its own modules
        cast(Any, part)._init_weights = _on_whole_tensors(cast(Any, part)._init_weights, heads)


def initialise_as_usual(model: nn.Module) -> None:
    """Undo :func:`draw_heads_whole`."""
    for part in _models_in(model):
        del cast(Any, part)._init_weights


def _models_in(model: nn.Module) -> list[nn.Module]:
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _on_whole_tensors(own: Callable[[nn.Module], None], heads: set[nn.Module]) -> Callable[[nn.Module], None]:
    """A family's ``_init_weights`` that sees parameters whole: those it may fill in memory, large ones on meta."""

    def init_weights(module: nn.Module) -> None:
        held = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        fresh: dict[str, nn.Parameter] = {}
        for name, parameter in held.items():
            if getattr(parameter, "_is_hf_initialized", False):
                if isinstance(parameter, DTensor):
                    small = parameter.numel() <= DRAWN_IN_MEMORY
                    module._parameters[name] = _like_whole(parameter, "cpu" if small else "meta")
                    module._parameters[name]._is_hf_initialized = True  # type: ignore[union-attr]
            elif module in heads:
                fresh[name] = parameter
                module._parameters[name] = _like_whole(parameter, parameter.device)
        own(module)
        for name, parameter in fresh.items():
            copy_full_tensor_(parameter, module.get_parameter(name))
        module._parameters.update(held)

    return init_weights


def _like_whole(parameter: nn.Parameter, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=False)


def report_fresh_heads(path: str, keys: list[str]) -> None:
    """Say once, on rank 0, which head starts fresh."""
    if keys and ranks.rank() == 0:
        print(f"[hf_fsdpturbo] {path} has no {', '.join(keys)}: drawn at random, equal on all ranks.", flush=True)
