"""``RouterTraining``: routers of a trainer's model that are frozen, learn at a rate of their own, or are balanced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from hf_fsdpturbo.lora.adapter_files import is_peft
from hf_fsdpturbo.routers.bias_update import BiasUpdate
from hf_fsdpturbo.routers.found import find_routers
from hf_fsdpturbo.routers.rates import refuse_other_ratio, split_groups
from hf_fsdpturbo.telemetry.expert_counts import CountReader, ExpertCounts, counted_modules
from hf_fsdpturbo.telemetry.real_tokens import RealTokens


class RouterTraining(TrainerCallback):
    """One trainer's; does nothing where none of its settings was given.

    Args:
        trainer: read for its model, optimizer and state.
        config: whose ``freeze_routers``, ``router_lr_scale`` and ``router_bias_update_rate`` it carries out.
    """

    def __init__(self, trainer: Any, config: Any) -> None:
        self.trainer, self.config = trainer, config
        self.freeze, self.scale = config.freeze_routers, config.router_lr_scale
        self.rate = config.router_bias_update_rate
        self.parameters: set[nn.Parameter] = set()
        self.update: BiasUpdate | None = None
        self.reader: CountReader | None = None
        self._own_counts: ExpertCounts | None = None
        self.has_groups = False

    def install(self) -> list[str]:
        """Once the model is as it trains; returns notes for the summary.

        Raises:
            ValueError: the model has no routers, or none that can be trained so; alike on all ranks.
        """
        wanted = {
            "freeze_routers": self.freeze,
            "router_lr_scale": self.scale != 1,
            "router_bias_update_rate": self.rate is not None,
        }
        if not any(wanted.values()):
            return []
        model: Any = self.trainer.model
        base = model.get_base_model() if is_peft(model) else model
        routers = find_routers(base) if hasattr(base, "config") else {}
        if not routers:
            given = ", ".join(name for name, is_wanted in wanted.items() if is_wanted)
            raise ValueError(f"{given}: no routers were found in {type(base).__name__}. Leave it out.")
        self.parameters = {parameter for router in routers.values() for parameter in router.parameters()}
        self.trainer.add_callback(self)
        notes = []
        if self.freeze:
            for parameter in self.parameters:
                parameter.requires_grad_(False)
            notes.append(f"{len(routers)} routers are frozen")
        if self.rate is not None:
            notes.append(self._balance(base))
        return notes

    def _balance(self, model: nn.Module) -> str:
        if is_peft(self.trainer.model):
            raise ValueError(
                f"router_bias_update_rate={self.rate:g} with an adapter: correction biases belong to the base model, "
                "and adapter files would not hold them. Leave it out."
            )
        if (backend := self.config.fsdpturbo_params.ep_backend) != "torch":
            raise ValueError(
                f"router_bias_update_rate={self.rate:g} with ep_backend={backend!r}: nobody counts what that library "
                "sends to experts. Leave one of them out."
            )
        layers = {name: experts for name, (_, experts) in counted_modules(model).items()}
        self.update = BiasUpdate(model, layers, self.rate)
        found = f"{len(self.update.biases)} of {len(layers)} MoE layers"
        return f"correction biases of {found} are balanced by {self.rate:g} a step"

    def _counts(self) -> ExpertCounts:
        """Telemetry's counter, or one of our own where that is off."""
        if (shared := self.trainer._telemetry.expert_counts) is not None:
            return shared
        if self._own_counts is None:
            device = self.trainer.args.device
            tokens = RealTokens(device)
            self._own_counts = ExpertCounts(self.trainer.model, tokens, device)
            tokens.attach(self.trainer.model)
            self._own_counts.attach()
        return self._own_counts

    def give_rates(self, optimizer: Any, was_given: bool) -> None:
        """Split the groups of an optimizer that has not stepped yet.

        Args:
            optimizer: as the trainer made it.
            was_given: it was there before: the user's, or ours of an earlier ``train()``.

        Raises:
            ValueError: the optimizer is the user's, or no router trains.
        """
        if self.scale == 1 or (was_given and self.has_groups):
            return
        if was_given or not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"router_lr_scale={self.scale:g} acts on an optimizer that is made from the arguments. Leave it out, "
                "and give your optimizer a group for the routers."
            )
        split_groups(optimizer, self.parameters, self.scale)
        self.has_groups = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Weights and optimizer are those of the checkpoint now, if there is one."""
        if self.scale != 1:
            refuse_other_ratio(self.trainer.optimizer, self.parameters, self.scale)
        if self.update is not None:
            self.update.begin()
        self.reader = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first one: all others who count have begun by now."""
        if self.update is not None and self.reader is None:
            self.reader = self._counts().reader()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One update a step, by the tokens of all its micro-batches on all ranks; none where the step is left out."""
        if self.update is None or self.reader is None:
            return
        if self.trainer._finite.skipped or self.trainer.accelerator.optimizer_step_was_skipped:
            self.reader.local()
        else:
            self.update.apply(self.reader.counts.by_layer(self.reader.all_ranks()))
