"""TRL's trainers and configs with the mixin in front: two names to change, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from hf_fsdpturbo.arguments import FSDPTurboArguments
from hf_fsdpturbo.trainer.mixin import FSDPTurboTrainerMixin


@dataclass
class FSDPTurboSFTConfig(FSDPTurboArguments, SFTConfig):
    """``trl.SFTConfig`` with the fields of :class:`FSDPTurboArguments`."""


class FSDPTurboSFTTrainer(FSDPTurboTrainerMixin, SFTTrainer):
    """``trl.SFTTrainer`` with experts spread over ranks."""


@dataclass
class FSDPTurboDPOConfig(FSDPTurboArguments, DPOConfig):
    """``trl.DPOConfig`` with the fields of :class:`FSDPTurboArguments`."""


class FSDPTurboDPOTrainer(FSDPTurboTrainerMixin, DPOTrainer):
    """``trl.DPOTrainer`` with experts spread over ranks; ``ref_model`` may be a path too, and is sharded."""


@dataclass
class FSDPTurboRewardConfig(FSDPTurboArguments, RewardConfig):
    """``trl.RewardConfig`` with the fields of :class:`FSDPTurboArguments`."""


class FSDPTurboRewardTrainer(FSDPTurboTrainerMixin, RewardTrainer):
    """``trl.RewardTrainer`` with experts spread over ranks; a fresh ``score`` head starts as in one process."""

    scalars_are_means = True  # accuracy and margin; token counts are gathered in training only
