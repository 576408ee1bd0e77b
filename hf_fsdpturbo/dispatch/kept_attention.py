"""Attention under ``recompute="selective"``: the recompute has its output from the tape and runs no attention again.

Kept is what the one operator returns (the output, and a number a query and head), not query, key and value, which a
recompute makes anyway. The operator's own autograd code then saves in both the same tensors.

A dispatch mode sees that operator, open only while Transformers' attention function runs: five calls a layer pass
through it, not the layer's hundred.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fsdpturbo.dispatch.recompute import current_tape, keep_or_make

OPERATORS = frozenset(
    {
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "npu::npu_fusion_attention",
    }
)
# Keys of Transformers' registry whose functions may run one of them; the second is ours at cp_size > 1.
IMPLEMENTATIONS = ("sdpa", "turbo_ulysses_sdpa", "flash_attention_2", "turbo_ulysses_fa2")


def _detached(results: Any) -> Any:
    """An operator's results as new tensors on the same memory: autograd writes its history onto those it gets."""
    if isinstance(results, Tensor):
        return results.detach()
    return type(results)(map(_detached, results)) if isinstance(results, tuple | list) else results


class _OnTape(TorchDispatchMode):
    """Takes the results of :data:`OPERATORS` from the tape; every other operator runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() not in OPERATORS:
            return func(*args, **(kwargs or {}))
        return _detached(keep_or_make(lambda: _detached(func(*args, **(kwargs or {})))))


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of Transformers' registry, its output kept where the tape of the call keeps results.

    With dropout it runs again: a recompute that draws less than the forward would draw other numbers after it.
    """

    @functools.wraps(function)
    def attention(*args: Any, **kwargs: Any) -> Any:
        tape = current_tape()
        if tape is None or not tape.keeps or kwargs.get("dropout"):
            return function(*args, **kwargs)
        with _OnTape():
            return function(*args, **kwargs)

    return attention


_installed: dict[str, Callable[..., Any]] = {}  # what stands in the registry, for the life of the process


def attention_implementations(model: nn.Module) -> set[str]:
    """Names of the attention functions that the model's modules call now."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return {name for config in configs if (name := getattr(config, "_attn_implementation", None)) is not None}


def keep_attention(model: nn.Module) -> tuple[set[str], set[str]]:
    """Let recompute of ``model`` have attention's output from the tape; other models are left as they were.

    Returns:
        names of the attention functions whose output is kept, and of those that run again (eager attention and flex
        attention have no output of one operator to keep).
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names = attention_implementations(model)
    known = names.intersection(IMPLEMENTATIONS)
    for name in known:
        function = cast(Callable[..., Any], ALL_ATTENTION_FUNCTIONS[name])
        if function is not _installed.get(name):
            _installed[name] = _kept(function)
            ALL_ATTENTION_FUNCTIONS.register(name, _installed[name])
    return known, names - known
