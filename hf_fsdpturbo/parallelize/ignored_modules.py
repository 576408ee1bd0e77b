"""fsdp_ignored_modules: parameters that no FSDP unit manages, cast for a forward as a unit casts its own.

In a bf16 run FSDP hands a unit's modules bf16 inputs and bf16 weights. A parameter it does not manage stays as it is
stored, and float32 weights would meet bf16 inputs. So while a module runs, its code finds them in the compute dtype;
their gradients flow to what is stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_fsdpturbo.model_spec import name_matches
from hf_fsdpturbo.sharding.outer_fsdp import decoder_layers


def ignored_parameters(model: nn.Module, patterns: list[str]) -> set[nn.Parameter]:
    """Parameters of all modules that a pattern names."""
    return {
        parameter
        for name, module in model.named_modules()
        if any(name_matches(pattern, name) for pattern in patterns)
        for parameter in module.parameters()
    }


def check_patterns(model: nn.Module, patterns: list[str], experts: set[nn.Parameter]) -> None:
    """Every pattern must name a parameter that FSDP would manage otherwise.

    Raises:
        ValueError: a pattern that names nothing, or nothing but experts.
    """
    for pattern in patterns:
        if not any(name_matches(pattern, name) for name, _ in model.named_modules()):
            raise ValueError(
                f"fsdp_ignored_modules: the pattern {pattern!r} matches no module of {type(model).__name__}. Use "
                "names as model.named_modules() gives them, with {*} for a number."
            )
        if not ignored_parameters(model, [pattern]) - experts:
            raise ValueError(
                f"fsdp_ignored_modules: the pattern {pattern!r} names only experts, which are left out of the outer "
                "units anyway, or modules without parameters, and has no effect. Remove it."
            )


class _CastWhileRunning:
    """Forward hooks of one module: its code, or its child's, reads ``weight`` and finds it in the compute dtype."""

    def __init__(self, places: list[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
        self.places = places
        self.dtype = dtype
        self.stored: list[Tensor | None] | None = None

    def show(self, holder: nn.Module, args: Any) -> None:
        if self.stored is not None:  # shown already: casts must not be taken for what is stored
            return
        self.stored = [module._parameters[name] for module, name in self.places]
        cast: dict[Tensor, Tensor] = {p: p.to(self.dtype) for p in dict.fromkeys(self.stored) if p is not None}
        for (module, name), parameter in zip(self.places, self.stored, strict=True):
            if parameter is not None:
                module._parameters[name] = cast[parameter]  # type: ignore[assignment]

    def put_back(self, holder: nn.Module, args: Any, output: Any) -> None:
        stored, self.stored = self.stored or [], None
        for (module, name), parameter in zip(self.places, stored, strict=False):
            module._parameters[name] = parameter  # type: ignore[assignment]


def _holders(model: nn.Module) -> Iterator[nn.Module]:
    """Modules whose hooks run whenever code reads a parameter inside them, smallest first.

    Of a decoder layer these are the children: activation checkpointing recomputes ``forward`` of the layer, not its
    hooks. A child as a whole, since it may read the weight of a module inside it (convolutions); so may the root.
    """

    def called(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                yield from called(child)
            else:
                yield child

    layers = decoder_layers(model)
    for layer in layers:
        yield from called(layer)
    yield from layers
    yield model


def compute_in(model: nn.Module, free: set[nn.Parameter], dtype: torch.dtype | None) -> None:
    """Make the parameters in ``free`` compute in ``dtype`` (None: as stored), by hooks on modules round them.

    Those that the model keeps in another dtype than its other parameters (routers in float32) keep it, as in a unit.
    Call it before the outer units are made: it looks for decoder layers.
    """
    count: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        count[parameter.dtype] += parameter.numel()
    usual = count.most_common(1)[0][0]
    if dtype is None or usual == dtype:
        return
    done: set[tuple[int, str]] = set()
    for holder in _holders(model):
        places = [
            (module, name)
            for module in holder.modules()
            for name, parameter in module._parameters.items()
            if parameter in free and parameter.dtype == usual and (id(module), name) not in done
        ]
        done.update((id(module), name) for module, name in places)
        if places:
            cast = _CastWhileRunning(places, dtype)
            holder.register_forward_pre_hook(cast.show)
            holder.register_forward_hook(cast.put_back, always_call=True)
