"""Replace functions that a modeling file looks up in its own globals, process-wide, counted, and put back at the end.

Transformers 5.24 decorates kernels such as ``torch_chunk_gated_delta_rule`` or ``apply_rotary_pos_emb`` at module
level and calls them as globals of the modeling file, so that file's globals are where a replacement must go. Every
model of the file in this process then runs it. Hence: replacements come in named layers ("kernels" below,
"context_parallel" on top of it), each with a key that says what was asked for; a second model with the same key shares
the layer, one with another key is refused; the originals return when the last user lets go, or is garbage-collected.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_fsdpturbo.code_facts import forward_or_warning

Function = Callable[..., Any]
Undo = Callable[[], None]

RULE, RECURRENT, CONV, ROTARY = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "apply_rotary_pos_emb",
)


@dataclass
class _Layer:
    name: str
    key: Hashable
    functions: dict[str, Function]
    users: int = 0


@dataclass
class _File:
    """One modeling file: its globals, what they held at first, and our layers, the last one on top."""

    scope: dict[str, Any]
    originals: dict[str, Function] = field(default_factory=dict)
    layers: list[_Layer] = field(default_factory=list)

    def refresh(self) -> None:
        for name, original in self.originals.items():
            self.scope[name] = next(
                (layer.functions[name] for layer in reversed(self.layers) if name in layer.functions), original
            )


_FILES: dict[int, _File] = {}  # by id of the globals dict, which lives as long as the interpreter


def scope_of(module: nn.Module, name: str) -> dict[str, Any] | None:
    """The globals in which ``module``'s forward looks up ``name``, or None if it uses no such global."""
    forward = forward_or_warning(module, f"whether it calls {name}")
    if forward is None or name not in forward.__code__.co_names or name not in forward.__globals__:
        return None
    scope: dict[str, Any] = forward.__globals__
    return scope


def linear_attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``(fqn, module)`` of every gated-delta-rule layer."""
    for fqn, module in model.named_modules():
        if scope_of(module, RULE) is not None:
            yield fqn, module


def bind(model: nn.Module, layer: str, key: Hashable, scope: dict[str, Any], functions: dict[str, Function]) -> Undo:
    """Put ``functions`` (global name -> replacement) into one modeling file's globals for as long as ``model`` lives.

    Returns:
        The undo; calling it twice is harmless.

    Raises:
        ValueError: the layer already holds another key there (two models with different settings in one process).
    """
    file = _FILES.setdefault(id(scope), _File(scope))
    found = next((present for present in file.layers if present.name == layer), None)
    if found is not None and found.key != key:
        del found
        gc.collect()  # a model that is gone but sits in a reference cycle still holds its layer
        found = next((present for present in file.layers if present.name == layer), None)
    if found is not None and found.key != key:
        raise ValueError(
            f"Two models of {scope.get('__name__')} in one process ask for different {layer} settings: {found.key!r} "
            f"is in use, {key!r} was asked for. These functions are shared by all models of that file: use one "
            "setting, or close (delete) the first model."
        )
    if found is None:
        found = _Layer(layer, key, functions)
        for name in functions:
            file.originals.setdefault(name, scope[name])
        file.layers.append(found)
        file.refresh()
    found.users += 1
    undo = weakref.finalize(model, _release, file, found)
    undo.atexit = False
    return undo


def _release(file: _File, layer: _Layer) -> None:
    layer.users -= 1
    if layer.users == 0:
        file.layers = [present for present in file.layers if present is not layer]
        file.refresh()
        if not file.layers:
            _FILES.pop(id(file.scope), None)


def rebind(
    model: nn.Module,
    *,
    rule: Function,
    conv: Function,
    recurrent: Function | None = None,
    layer: str = "context_parallel",
    key: Hashable = None,
) -> Undo:
    """Replace the gated delta rule and its convolution in every modeling file that ``model`` uses.

    To build on what is there, take ``current(model, RULE)`` first.

    Args:
        model: in whose files, and for as long as it lives.
        rule: called as Transformers calls ``torch_chunk_gated_delta_rule``, plus the keyword ``documents`` (see
            packing/documents.py) when the batch is packed.
        conv: called as ``causal_conv1d_fn``, same extra.
        recurrent: called as ``torch_recurrent_gated_delta_rule``; None leaves it.
        layer, key: see :func:`bind`.

    Returns:
        The undo.

    Raises:
        ValueError: the model has no linear attention, or see :func:`bind`.
    """
    scopes = {id(s): s for _, m in linear_attention_layers(model) if (s := scope_of(m, RULE)) is not None}
    if not scopes:
        raise ValueError(f"{type(model).__name__} has no layer that calls {RULE}: no linear attention to replace.")
    functions = {RULE: rule, CONV: conv, **({RECURRENT: recurrent} if recurrent is not None else {})}
    undos = [
        bind(model, layer, key, scope, {n: f for n, f in functions.items() if n in scope}) for scope in scopes.values()
    ]

    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo


def current(model: nn.Module, name: str = RULE) -> Function:
    """The function that ``model``'s linear-attention layers call now under a global name (RULE, CONV, RECURRENT).

    Raises:
        ValueError: the model has no such layer.
    """
    for _, module in linear_attention_layers(model):
        scope = scope_of(module, RULE)
        if scope is not None and name in scope:
            function: Function = scope[name]
            return function
    raise ValueError(f"{type(model).__name__} has no linear-attention layer, so nothing is called as {name}.")


def current_rule(model: nn.Module) -> Function:
    """The gated delta rule in use: what context parallelism wraps."""
    return current(model, RULE)


def current_conv(model: nn.Module) -> Function:
    """The causal convolution in use."""
    return current(model, CONV)
