"""What one load puts into a model besides weights: the adapter, and the weights that stay packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_fsdpturbo.loading.heads import share_random_state
from hf_fsdpturbo.lora.adapter import (
    add_adapter,
    add_reference,
    draw_adapters,
    fill_reference,
    hide,
    make_shardable,
    refuse_other_adapters,
)
from hf_fsdpturbo.lora.adapter_files import is_peft
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.parallelize.order import ShardingReport, parallelize_model
from hf_fsdpturbo.parallelize.quantise import choose_weights, replace_weights
from hf_fsdpturbo.quantised.filling import Filling
from hf_fsdpturbo.shards import materialize

if TYPE_CHECKING:
    from hf_fsdpturbo.arguments import FSDPTurboArguments


class Adapter:
    """The adapter of one load: from ``peft_config``, or in a PEFT model that was given whole, or none.

    Args:
        config: what to add; None adds nothing.
        model: the model that was given, if it was an object.
        head_unit: as ``parallelize_model`` has it; not with an adapter, which may sit on the head.
        with_images: as ``parallelize_model`` has it.
        with_reference: the adapter as it is now stays beside the trained one, as a preference trainer's reference.
        filling: the frozen weights that are quantised, if any.

    Raises:
        ValueError: it has an adapter that is not LoRA.
    """

    def __init__(
        self,
        config: Any,
        model: Any = None,
        *,
        head_unit: bool = False,
        with_images: bool = False,
        with_reference: bool = False,
        filling: Filling | None = None,
    ) -> None:
        self.filling, self.with_images = filling, with_images
        self.config, self.head_unit, self.with_reference = config, head_unit, with_reference
        self.peft_model: Any = model if is_peft(model) else None
        if self.peft_model is not None:
            refuse_other_adapters(self.peft_model)
        self.on_meta = False
        self.show: Callable[[], None] = lambda: None
        self.frozen: list[tuple[nn.Module, str]] = []

    def parallelize(
        self, model: Any, args: FSDPTurboArguments, state: FSDPTurboParallelState
    ) -> tuple[Any, ShardingReport]:
        """``parallelize_model`` of a base model with the adapter in it; after it the wrappers are hidden.

        Raises:
            ValueError: the adapter does not fit; naming field, value, rule, fix.
        """
        self._add(model, expert_first=True)
        if self.peft_model is not None and args.fsdpturbo_params.ep_backend != "torch":
            raise ValueError(
                f"ep_backend={args.fsdpturbo_params.ep_backend!r} does not take LoRA. Set ep_backend to 'torch'."
            )
        head_unit = self.head_unit and self.peft_model is None
        model, report = parallelize_model(model, args, state, head_unit=head_unit, with_images=self.with_images)
        self._hide(model)
        if self.peft_model is not None:
            self.peft_model._is_accelerate_prepared = True
        return model, report

    def alone(self, model: Any) -> Any:
        """In one process: the base model with the adapter in it, which PEFT itself saves; wrappers hidden."""
        self._add(model, expert_first=False)
        self._hide(model)
        return model

    def _add(self, model: Any, expert_first: bool) -> None:
        if self.filling is not None:
            choose_weights(model, self.filling)
        if self.config is not None:
            self.on_meta = any(parameter.device.type == "meta" for parameter in model.parameters())
            self.peft_model = add_adapter(model, self.config, expert_first)
        elif self.peft_model is not None and expert_first:
            make_shardable(self.peft_model)
        if self.with_reference:
            add_reference(self.peft_model)
        if self.filling is not None:
            replace_weights(model, self.filling, adapted=self.peft_model is not None)

    def _hide(self, model: Any) -> None:
        if self.peft_model is not None:
            self.frozen = [(m, n) for m in model.modules() for n, p in m._parameters.items() if _is_frozen(p)]
            self.show = hide(model)
        if self.filling is not None:
            self.filling.expect()

    def finish(self, model: Any, device: torch.device) -> Any:
        """The PEFT model, adapters drawn; the model itself where there is no adapter."""
        if self.filling is not None:
            self.filling.settle()
        self.show()
        for module, name in self.frozen:  # the loader makes plain (whole) parameters anew, and they would train
            getattr(module, name).requires_grad_(False)
        if self.on_meta:
            materialize(self.peft_model, device)
            share_random_state()  # a load may have drawn for shards, whose sizes differ from rank to rank
            draw_adapters(self.peft_model)
        if self.with_reference:
            fill_reference(self.peft_model)
        return model if self.peft_model is None else self.peft_model


def _is_frozen(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and not parameter.requires_grad
