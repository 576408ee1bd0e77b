"""Routing tape: activation checkpointing replays the forward's routing decision and plan instead of making them again.

A recompute that routes differently by one near-tie breaks: its splits no longer match the forward's, on some ranks
only. So one tape per checkpointed call (hence per layer and micro-batch) records, in the forward,

* the indices of every top-k inside the routers: in recompute values are gathered at the recorded indices, by the same
  differentiable operator in both passes (so that the tensors autograd saved line up);
* each dispatcher's plan: order, slots, split sizes. Recompute exchanges rows, but counts nothing and syncs no host.

With ``recompute="selective"`` the tape also keeps results that are dear to make (:func:`keep_or_make`): the rows that
an exchange brought, the up matmul's output, attention's output (``kept_attention.py``). Gradients are the same bits.

What looks like a shortcut and is wrong: replaying the plan alone (the router's gradient goes to another expert), and
keeping the top-k values of the forward (modules normalise them in place). ``tests/unit/test_recompute.py`` puts both
back.

Outside checkpointing there is no tape, and nothing is intercepted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hf_fsdpturbo.code_facts import warn

Value = TypeVar("Value")
_active = threading.local()  # backward runs in a thread of its own on accelerators, and enters its contexts there


class RoutingTape:
    """What one checkpointed call decided, in order. Lives as long as the call's graph.

    Args:
        keeps: whether it also keeps results that are dear to make.
    """

    def __init__(self, keeps: bool = False) -> None:
        self.keeps = keeps
        self._entries: list[Any] = []
        self._next: int | None = None  # None records

    def record_or_replay(self, make: Callable[[], Value]) -> Value:
        """The forward's value, made on the first pass and read on the others."""
        if self._next is None:
            self._entries.append(make())
            return self._entries[-1]
        if self._next >= len(self._entries):
            raise RuntimeError(
                "recompute took a routing decision that the forward did not: the layer is not deterministic"
            )
        self._next += 1
        return self._entries[self._next - 1]

    @property
    def replays(self) -> bool:
        """Whether a recompute is running."""
        return self._next is not None

    def begin(self, replay: bool) -> None:
        """Start a pass: the first records, each recompute replays from the start."""
        self._next = 0 if replay else None


class _TapePass(contextlib.AbstractContextManager[None]):
    """Makes a tape the current one for one pass. May be entered again: a graph that is kept is recomputed again."""

    def __init__(self, tape: RoutingTape, replay: bool) -> None:
        self._tape = tape
        self._replay = replay
        self._outer: list[RoutingTape | None] = []

    def __enter__(self) -> None:
        self._outer.append(current_tape())
        self._tape.begin(self._replay)
        _active.tape = self._tape

    def __exit__(self, *exception: object) -> None:
        _active.tape = self._outer.pop()


def current_tape() -> RoutingTape | None:
    """The tape of the checkpointed call that is running in this thread, if any."""
    return getattr(_active, "tape", None)


def record_or_replay(make: Callable[[], Value]) -> Value:
    """``make()``, or inside recompute what it returned in the forward. Without a tape just ``make()``."""
    tape = current_tape()
    return make() if tape is None else tape.record_or_replay(make)


def keep_or_make(make: Callable[[], Value]) -> Value:
    """``make()``, or what it returned in the forward where the tape keeps results.

    What is kept may be saved for backward, but not returned from an autograd function, which would write its own
    history onto the tape: return a view.
    """
    tape = current_tape()
    return make() if tape is None or not tape.keeps else tape.record_or_replay(make)


def is_recompute() -> bool:
    """Whether what runs now is the recompute of a checkpointed call."""
    tape = current_tape()
    return tape is not None and tape.replays


def has_kept() -> bool:
    """Whether what runs now is a recompute that has from the forward what is dear."""
    tape = current_tape()
    return tape is not None and tape.replays and tape.keeps


@contextlib.contextmanager
def no_tape() -> Iterator[None]:
    """Run a block that belongs to no checkpointed call, whatever surrounds it."""
    outer = current_tape()
    _active.tape = None
    try:
        yield
    finally:
        _active.tape = outer


def tape_contexts(
    keeps: bool = False,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """The ``context_fn`` of ``torch.utils.checkpoint``: forward and recompute share one new tape."""
    tape = RoutingTape(keeps)
    return _TapePass(tape, replay=False), _TapePass(tape, replay=True)


class _TapedTopK(TorchFunctionMode):
    """Turns top-k into: indices from the tape, values gathered there."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        names = ("input", "k", "dim", "largest", "sorted")
        given = dict(zip(names, args, strict=False)) | kwargs
        source = given.pop("input")
        indices = record_or_replay(lambda: torch.topk(source.detach(), **given).indices)
        return torch.return_types.topk((source.gather(given.get("dim", -1), indices), indices))  # type: ignore[attr-defined]


def _calls_topk(module: nn.Module) -> bool:
    for owner in type(module).__mro__:
        for attribute in vars(owner).values():
            code = getattr(inspect.unwrap(attribute), "__code__", None)
            if isinstance(code, types.CodeType) and "topk" in code.co_names:
                return True
    return False


def find_routers(model: nn.Module, experts: Collection[str] = ()) -> dict[str, nn.Module]:
    """Modules that choose experts: those with top-k in their code, at the parent of an experts module or below it.

    Experts modules are those called ``experts``, and those whose full names are in ``experts``. One without a router
    is warned of with ``HiddenCodeWarning``.
    """
    modules = dict(model.named_modules())
    routers: dict[str, nn.Module] = {}
    for name in modules:
        parent_name, _, leaf = name.rpartition(".")
        if (leaf != "experts" and name not in experts) or parent_name not in modules:
            continue
        block = dict(modules[parent_name].named_modules(prefix=parent_name))
        found = {inner_name: inner for inner_name, inner in block.items() if _calls_topk(inner)}
        if not found:
            warn(f"no router of {name} found: no module of {parent_name} calls topk. Recompute may route otherwise.")
        routers.update(found)
    return routers


def _tape_router(router: nn.Module) -> None:
    forward = router.forward

    def taped_forward(*args: Any, **kwargs: Any) -> Any:
        if current_tape() is None:
            return forward(*args, **kwargs)
        with _TapedTopK():
            return forward(*args, **kwargs)

    router.forward = taped_forward  # type: ignore[method-assign]


def install_routing_tape(
    model: nn.Module, experts: Collection[str] = (), keeps: bool = False, alone: bool = False
) -> list[str]:
    """Make activation checkpointing of ``model`` replay its routing. Call once, before checkpointing is switched on.

    Wraps the routers' forward and, on this instance, ``_set_gradient_checkpointing`` (where Transformers hands its
    checkpoint function to the layers): a function in ``gradient_checkpointing_kwargs`` would not survive
    ``TrainingArguments.to_json_string``.

    Args:
        model: whose layers are checkpointed.
        experts: names of experts modules that are not called ``experts``.
        keeps: whether tapes keep what is dear (``recompute="selective"``).
        alone: nothing is sharded: a model without routers is left as it is.

    Returns:
        Names of the routers found.

    Raises:
        ValueError: at switch-on, ``use_reentrant=True`` or a ``context_fn`` of the user's own.
    """
    routers = find_routers(model, experts)
    for router in routers.values():
        _tape_router(router)
    set_checkpointing = getattr(model, "_set_gradient_checkpointing", None)
    if set_checkpointing is None or (alone and not routers):
        return list(routers)

    def set_taped(enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **kwargs: Any) -> Any:
        if enable:
            gradient_checkpointing_func = _with_tape(gradient_checkpointing_func, keeps)
        return set_checkpointing(enable=enable, gradient_checkpointing_func=gradient_checkpointing_func, **kwargs)

    model._set_gradient_checkpointing = set_taped  # type: ignore[assignment]
    return list(routers)


def _with_tape(function: Any, keeps: bool = False) -> Callable[..., Any]:
    given = dict(getattr(function, "keywords", {}))
    if given.get("use_reentrant", False):
        raise ValueError(
            "gradient_checkpointing_kwargs={'use_reentrant': True} cannot replay expert routing, and leaves the "
            "router's aux loss without a gradient. Set use_reentrant to False."
        )
    if given.get("context_fn") is not None:
        raise ValueError(
            "gradient_checkpointing_kwargs['context_fn'] is taken by the routing tape of expert parallelism. "
            "Leave it out."
        )

    contexts = functools.partial(tape_contexts, keeps)

    def taped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{"use_reentrant": False, **kwargs, "context_fn": contexts})

    return taped
