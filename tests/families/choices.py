"""Modes of a run that take luck or a gap of autocast out of a comparison: forced top-k choices, grouped matmuls.

A router that chooses another expert in bf16 than in float32 moves whole gradients; so do indexers of sparse attention.
All of them ask ``topk``, so its indices are recorded in order, and other runs get theirs from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NAMES = ("input", "k", "dim", "largest", "sorted")


class Choices(TorchFunctionMode):
    """While it is entered, every ``topk`` is recorded, or answered with the indices of another run.

    Args:
        given: indices of the other run, in order; None records.

    Attributes:
        made: indices in the order of the calls, forced ones included.
        flipped: rows of all calls in which this run would have chosen otherwise.
    """

    def __init__(self, given: list[Tensor] | None = None) -> None:
        super().__init__()
        self.given = given
        self.made: list[Tensor] = []
        self.flipped = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        call = dict(zip(NAMES, args, strict=False)) | (kwargs or {})
        dim, own = call.get("dim", -1), found.indices
        forced = own if self.given is None else self.given[len(self.made)]
        if forced.shape != own.shape:
            raise AssertionError(f"top-k call {len(self.made)} chooses {list(own.shape)}, not {list(forced.shape)}.")
        self.flipped += int((own.sort(dim).values != forced.sort(dim).values).any(dim).sum())
        self.made.append(forced.clone())
        return torch.return_types.topk((call["input"].gather(dim, forced), forced))  # type: ignore[attr-defined]

    def check_all_used(self) -> None:
        """Raises AssertionError where this run asked less often than the other."""
        if self.given is not None and len(self.made) != len(self.given):
            raise AssertionError(f"{len(self.made)} top-k calls, but the other run made {len(self.given)}.")


class GroupedMatmulsInBf16(TorchFunctionMode):
    """What autocast would do if it knew grouped matmuls: plain's float32 experts then compute in bf16, as ours do."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            args = tuple(a.bfloat16() if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in args)
        return func(*args, **(kwargs or {}))


def watch_experts(model: nn.Module) -> dict[str, list[Tensor]]:
    """By module with stacked weights, the expert indices of every call to come: what reaches it, whoever chose.

    Modules that are called without indices (families that hand scores to their experts) have none.
    """
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str, module: nn.Module) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            indices = [t for t in tensors if t.dtype in (torch.int32, torch.int64)]
            seen.setdefault(name, []).extend(t.detach().clone() for t in indices[:1])

        module.register_forward_pre_hook(hook, with_kwargs=True)

    for name, module in model.named_modules():
        stacks = [p for p in module.parameters(recurse=False) if p.ndim == 3]
        if stacks and not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
            watch(name, module)
    return seen
