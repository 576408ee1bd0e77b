"""bf16 compute as plain Trainer has it: torch's autocast round the model, float32 where that keeps float32.

FSDP gathers matrices in bf16, which is what autocast would make of them at every use. Everything that autocast leaves
alone (norms, sinks, decay rates) is gathered as stored, and the stream between layers has the dtype it has in one
process. No unit casts its inputs: modules of 60 families were written for autocast, not for FSDP's casts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_fsdpturbo.loading.dtypes import kept_in_float32
from hf_fsdpturbo.sharding.expert_lora import name_without_wrappers

ELEMENTWISE = ("A_log",)
"""Ends of names of matrices that no matmul reads: autocast leaves them alone."""


def compute_as_autocast(model: Any, device_type: str, dtype: torch.dtype | None) -> None:
    """Run the model in autocast (None: not), and modules that Transformers keeps in float32 out of it."""
    if dtype is None:
        return
    kept = {parameter for parameter in kept_in_float32(model, dtype) if parameter.dtype == torch.float32}
    for module in _made_of(model, kept):
        run_in_autocast(module, device_type, dtype, enabled=False)
    run_in_autocast(model, device_type, dtype)


def _made_of(module: nn.Module, kept: set[nn.Parameter]) -> Iterator[nn.Module]:
    """Outermost modules, matrices among their parameters, that have no others than ``kept``."""
    parameters = list(module.parameters())
    if parameters and all(parameter in kept for parameter in parameters):
        if any(parameter.ndim > 1 for parameter in parameters):
            yield module
        return
    for child in module.children():
        yield from _made_of(child, kept)


class _Autocast:
    """Forward hooks of one module: autocast is on, or off, while it runs; nested and recomputed calls included."""

    def __init__(self, device_type: str, dtype: torch.dtype, enabled: bool) -> None:
        self.arguments = (device_type, dtype, enabled)
        self.open: list[torch.autocast] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        self.open.append(torch.autocast(*self.arguments))
        self.open[-1].__enter__()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.open:
            self.open.pop().__exit__(None, None, None)


def run_in_autocast(module: nn.Module, device_type: str, dtype: torch.dtype, enabled: bool = True) -> None:
    """Switch autocast on, or off, for every call of a module, also one that raises."""
    hooks = _Autocast(device_type, dtype, enabled)
    module.register_forward_pre_hook(hooks.enter, prepend=True)
    module.register_forward_hook(hooks.leave, always_call=True)


def compute_rows_in(experts: nn.Module, dtype: torch.dtype | None) -> None:
    """Hand an experts module of the upstream library its rows in ``dtype`` (None: as they are): no autocast there."""
    if dtype is not None:
        experts.register_forward_pre_hook(lambda module, args: (args[0].to(dtype), *args[1:]))


def float32_parameters(model: Any, dtype: torch.dtype | None) -> set[nn.Parameter]:
    """Parameters that compute in float32 in a run in ``dtype``: stored in float32, and no matmul reads them.

    Those are vectors and scalars (a linear layer's bias is cast at its use), embeddings, which the stream between
    layers takes its dtype from, and what Transformers keeps in float32; also what is tied to one of them.
    """
    if dtype is None:
        return set()
    found = set(kept_in_float32(model, dtype))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            read_as_stored = isinstance(module, nn.Embedding) or name.endswith(ELEMENTWISE)
            if parameter.ndim < 2 or read_as_stored:
                found.add(parameter)
    found |= _tied_to(found, model)
    return {parameter for parameter in found if parameter.dtype == torch.float32}


def _tied_to(found: set[nn.Parameter], model: Any) -> set[nn.Parameter]:
    """What is or will be one parameter with one of ``found``: on meta, before Transformers ties them, it is two."""
    every = model.named_parameters(remove_duplicate=False)
    named = {name_without_wrappers(name): parameter for name, parameter in every}
    ties = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    pairs = [{named[name] for name in pair} for pair in ties if named.keys() >= set(pair)]
    return {parameter for pair in pairs if pair & found for parameter in pair}
