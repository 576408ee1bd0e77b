"""``StepNorm``: the gradient norm of a trainer's step, and its clip; ours where the experts are."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_fsdpturbo import grad_norm


class StepNorm:
    """One trainer's; it keeps the groups of parameters, which are as static as the optimizer's own list."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.groups: list[grad_norm.ParameterGroup] | None = None

    @property
    def is_ours(self) -> bool:
        """Sharded, or in one process with our expert block; with a loss scaler accelerate unscales first."""
        report = self.trainer.sharding_report
        alone = report is not None and report.fused_alone > 0
        return self.trainer.parallel_state is not None or (alone and self.trainer.accelerator.scaler is None)

    def forget(self) -> None:
        """Parameters have changed."""
        self.groups = None

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """The global norm, float32 scalar, before clipping to ``max_norm``; inf only measures. Collective."""
        if self.groups is None:
            self.groups = grad_norm.parameter_groups(model)
        grad_norm.average_replicated_gradients_(self.groups)
        self.trainer.last_group_norms = grad_norm.clip_groups_(self.groups, max_norm)
        return self.trainer.last_group_norms["total"]
