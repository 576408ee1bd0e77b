"""``ExpertCounts``: how many tokens were routed to each expert of each layer, counted on the device as they pass.

    counts = ExpertCounts(model, real_tokens, device)     # a model as it trains: sharded, or whole in one process
    handles = counts.attach()                             # from now on; each handle has remove()
    reader = counts.reader()                              # as many as there are readers: none disturbs another
    ...
    flat_N = reader.local()                               # int64 [N] on the device, this rank's since the last call
    flat_N = reader.all_ranks()                           # the same summed over all ranks: ONE all-reduce of [N]
    for name, count_E in counts.by_layer(flat_N).items()  # int64 [E], experts numbered over all ranks

N is the sum of E over MoE layers. Neither call waits for the device. Each (token, choice) pair counts once: see
Note [A token counts once] in ``real_tokens.py``, whose ``attach`` must run too. Every rank counts the tokens that it
routes, never those that arrive, so that the sum over all ranks is exact at every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_fsdpturbo.expert_stacks import called_by, stack_names
from hf_fsdpturbo.parallelize.fused_experts import experts_modules
from hf_fsdpturbo.parallelize.routed_experts import RoutedForward
from hf_fsdpturbo.sharding.expert_lora import name_without_wrappers
from hf_fsdpturbo.telemetry.real_tokens import RealTokens, counts_now

Count = Callable[[Tensor, Tensor], None]


def counted_modules(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Modules that are called with rows and routing, and the number of experts over all ranks; in model order.

    Sharded ones are known by our forward, others by Transformers' flags. Names are those without PEFT's wrappers.
    """
    found: dict[str, tuple[nn.Module, int]] = {}
    for name, module in model.named_modules():
        if isinstance(routed := vars(module).get(called_by(module)), RoutedForward):
            found[_name(name)] = module, routed.dispatcher.num_experts
    if found:
        return found
    for name, module in experts_modules(model).items():
        own = dict(module.named_parameters(recurse=False))
        stacks = [own[stack] for stack in stack_names(module) if stack in own]
        if stacks:  # not a wrapper that shows the flags of what it wraps
            found[_name(name)] = module, stacks[0].shape[0]
    return found


def _name(name: str) -> str:
    return name_without_wrappers(name.removeprefix("base_model.model."))


class ExpertCounts:
    """The counts of one model.

    Args:
        model: as it trains; experts are looked for now.
        tokens: which rows are real.
        device: where counts are kept.

    Attributes:
        layers: number of experts by name of the experts module, in model order.
        totals: int64 ``[N]`` on ``device``, this rank's since the start; it only grows.
    """

    def __init__(self, model: nn.Module, tokens: RealTokens, device: torch.device) -> None:
        self.tokens = tokens
        self._modules = counted_modules(model)
        self.layers = {name: experts for name, (_, experts) in self._modules.items()}
        self.totals = torch.zeros(sum(self.layers.values()), dtype=torch.int64, device=device)

    def attach(self) -> list[Any]:
        """Count from now on; returns handles that end it."""
        views = self.by_layer(self.totals)
        return [_watch(module, self._counter(module, views[name])) for name, (module, _) in self._modules.items()]

    def by_layer(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Views ``[E]`` of a flat tensor by layer."""
        return dict(zip(self.layers, flat_N.split(list(self.layers.values())), strict=True))

    def reader(self) -> CountReader:
        """A reader whose first window begins now."""
        return CountReader(self)

    def _counter(self, module: nn.Module, count_E: Tensor) -> Count:
        def count(rows: Tensor, index: Tensor) -> None:
            if not counts_now(module):
                return
            number = rows.numel() // rows.shape[-1]
            choices = index.numel() // max(number, 1)
            weights = self.tokens.pair_weights(number, choices, getattr(module, "token_of_row", None))
            count_E.scatter_add_(0, index.detach().reshape(-1).to(torch.int64), weights)

        return count


class CountReader:
    """Counts since this reader last looked; made by :meth:`ExpertCounts.reader`."""

    def __init__(self, counts: ExpertCounts) -> None:
        self.counts = counts
        self._before_N = counts.totals.clone()

    def local(self) -> Tensor:
        """This rank's, int64 ``[N]``, a tensor of its own; the next window begins here. Nothing is communicated."""
        now_N = self.counts.totals.clone()
        window_N, self._before_N = now_N - self._before_N, now_N
        return window_N

    def all_ranks(self) -> Tensor:
        """As :meth:`local`, summed over all ranks, which call this together: one all-reduce of ``[N]``."""
        window_N = self.local()
        if dist.is_initialized():
            dist.all_reduce(window_N)
        return window_N


def _watch(module: nn.Module, count: Count) -> Any:
    """Show ``count`` the rows and choices of every call of an experts module."""
    called = called_by(module)
    if called == "forward":
        return module.register_forward_pre_hook(lambda _, args, kwargs: _show(count, args, kwargs), with_kwargs=True)
    forward = getattr(module, called)

    def counted(*args: Any, **kwargs: Any) -> Any:
        _show(count, args, kwargs)
        return forward(*args, **kwargs)

    setattr(module, called, counted)
    return _Put(module, called, forward)


def _show(count: Count, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = {**kwargs, **dict(zip(("hidden_states", "top_k_index"), args, strict=False))}
    if isinstance(given.get("top_k_index"), Tensor):
        count(given["hidden_states"], given["top_k_index"])


class _Put:
    """Handle that puts an attribute back."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self._put = module, name, value

    def remove(self) -> None:
        setattr(*self._put)
