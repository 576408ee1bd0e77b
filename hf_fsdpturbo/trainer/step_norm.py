"""``StepNorm``: the gradient norm of a trainer's step, and its clip; ours where the experts or the optimizer are.

Note [Who sees gradients between clip and step]. With our AdamW the clip is a factor that its step applies: gradients
in memory stay as they are, one pass over them less. A callback that defines ``on_pre_optimizer_step`` is called
between the two and may read them: with one, they are scaled in memory as in any trainer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from hf_fsdpturbo import grad_norm
from hf_fsdpturbo.checkpoint.dcp import unwrap_optimizer
from hf_fsdpturbo.images import TowerUse, tower_use
from hf_fsdpturbo.optim.one_pass import AdamW


class StepNorm:
    """One trainer's; it keeps the groups of parameters, which are as static as the optimizer's own list."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.groups: list[grad_norm.ParameterGroup] | None = None
        self.towers: TowerUse | None = None

    @property
    def is_ours(self) -> bool:
        """Sharded, or in one process with our expert block or AdamW; with a loss scaler accelerate unscales first."""
        report = self.trainer.sharding_report
        alone = self._own_optimizer() is not None or report is not None and report.fused_alone > 0
        return self.trainer.parallel_state is not None or (alone and self.trainer.accelerator.scaler is None)

    def forget(self) -> None:
        """Parameters have changed."""
        self.groups = None

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """The global norm, float32 scalar, before clipping to ``max_norm``; inf only measures. Collective."""
        if self.groups is None:
            self.groups, self.towers = grad_norm.parameter_groups(model), tower_use(model)
        if self.towers is not None:
            self.towers.settle()
        grad_norm.average_replicated_gradients_(self.groups)
        optimizer = self._own_optimizer()
        if optimizer is None or self._someone_looks():
            norms = grad_norm.clip_groups_(self.groups, max_norm)
        else:
            norms, optimizer.gradient_factor = grad_norm.measure_groups(self.groups, max_norm)
        self.trainer.last_group_norms = norms
        return norms["total"]

    def _own_optimizer(self) -> AdamW | None:
        """Ours, inside accelerate's wrapper."""
        optimizer = unwrap_optimizer(self.trainer.optimizer)
        return optimizer if isinstance(optimizer, AdamW) else None

    def _someone_looks(self) -> bool:
        """See Note [Who sees gradients between clip and step]."""
        default = TrainerCallback.on_pre_optimizer_step
        callbacks = self.trainer.callback_handler.callbacks
        return any(getattr(type(each), "on_pre_optimizer_step", default) is not default for each in callbacks)
