"""A model's frozen weights go to 4 bits as they are read: in memory is one of them in full beside what is packed.

built on meta -> choose -> adapters are added -> replace (bytes on meta) -> sharded as any weight
              -> read: the loader sees each weight in full; what it sets is quantised and let go
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from hf_fsdpturbo.quantised.asked import FourBit
from hf_fsdpturbo.quantised.choice import Choice, choose
from hf_fsdpturbo.quantised.packed_linear import PackedForward
from hf_fsdpturbo.quantised.packed_weight import PackedWeight
from hf_fsdpturbo.shards import local_tensor


class Filling:
    """The quantised weights of one model, from the choice to their values.

    Args:
        asked: what was asked for; None: nothing is quantised here (kept_release.py).
        device: where a weight in full is quantised.

    Attributes:
        choice: by :meth:`choose`, once the model is built.
    """

    def __init__(self, asked: FourBit | None, device: torch.device) -> None:
        self.asked, self.device = asked, device
        self.choice: Choice = {}
        self.weights: dict[str, PackedWeight] = {}
        self._expected: dict[str, PackedWeight] = {}

    def choose(
        self, model: nn.Module, stacks: Mapping[str, tuple[str, ...]], routers: Collection[nn.Module] = ()
    ) -> None:
        """Fill ``choice``; as :func:`quantised.choice.choose`, with its arguments and errors."""
        assert self.asked is not None
        self.choice = choose(model, self.asked, stacks, routers)

    def _made(self, name: str, module: nn.Module, leaf: str) -> PackedWeight:
        assert self.asked is not None
        return PackedWeight(module, leaf, self.asked, self.device)

    def replace(self, kept: Collection[nn.Module] = ()) -> None:
        """Put bytes in the place of the chosen weights; those with values are quantised at once.

        Args:
            kept: modules that stay in full, with all below: of them a copy is trained.
        """
        in_full = {below for module in kept for below in module.modules()}
        for name, (module, leaf) in self.choice.items():
            if module in in_full:
                continue
            self.weights[name] = self._made(name, module, leaf)
            if isinstance(module, nn.Linear):
                module.forward = PackedForward(module, self.weights[name])  # type: ignore[method-assign]

    def expect(self) -> None:
        """From now on a loader may set the weights that are on meta, in full; see :meth:`intercepted`."""
        for name, weight in self.weights.items():
            if local_tensor(weight.module.get_parameter(weight.name)).is_meta:
                weight.hide()
                self._expected[name] = weight

    @contextlib.contextmanager
    def intercepted(self) -> Iterator[None]:
        """While open, what Transformers' loader sets of an expected weight is quantised instead.

        The function by which it sets every parameter is wrapped for the length of the context, in this process.
        """
        from transformers import core_model_loading

        own = core_model_loading.set_param_for_module

        def set_param(model: Any, target_name: str, param_value: Tensor, loading_info: Any, hf_quantizer: Any) -> None:
            weight = self._expected.get(target_name)
            shown = None if weight is None else local_tensor(weight.module.get_parameter(weight.name))
            if weight is None or shown is None or shown.shape != param_value.shape:
                own(model, target_name, param_value, loading_info, hf_quantizer)  # says what does not fit
                return
            loading_info.missing_keys.discard(target_name)
            weight.fill(param_value.to(weight.dtype))

        core_model_loading.set_param_for_module = set_param
        try:
            yield
        finally:
            core_model_loading.set_param_for_module = own

    def settle(self) -> None:
        """After all ranks have read: the model is as it will be trained. Collective with double quantisation."""
        for weight in self.weights.values():
            weight.settle()
        self._expected.clear()

    def __str__(self) -> str:
        return f"{len(self.weights)} frozen weights in 4 bits ({self.asked}): {self.saved()}"

    def saved(self) -> str:
        """What a rank holds of them, and what they would take in full beside that."""
        packed = sum(weight.bytes_held() for weight in self.weights.values())
        full = sum(weight.bytes_in_full() for weight in self.weights.values())
        gib = 2**30
        return f"{packed / gib:.2f} GiB on this rank, {(full - packed) / gib:.2f} GiB saved"


def reading(build: Callable[..., Any], filling: Filling) -> Callable[..., Any]:
    """``build``, which builds and loads a model, with what it sets quantised."""

    @wraps(build)
    def around(*args: Any, **kwargs: Any) -> Any:
        with filling.intercepted():
            return build(*args, **kwargs)

    return around
