"""TRL's trainers with the mixin in front: two names to change, nothing else."""

from __future__ import annotations

from trl import DPOTrainer, RewardTrainer, SFTTrainer

from hf_fsdpturbo.trainer.mixin import FSDPTurboTrainerMixin
from hf_fsdpturbo.trl_configs import FSDPTurboDPOConfig as FSDPTurboDPOConfig
from hf_fsdpturbo.trl_configs import FSDPTurboRewardConfig as FSDPTurboRewardConfig
from hf_fsdpturbo.trl_configs import FSDPTurboSFTConfig as FSDPTurboSFTConfig
from hf_fsdpturbo.trl_configs import RecipeParser as RecipeParser


class FSDPTurboSFTTrainer(FSDPTurboTrainerMixin, SFTTrainer):
    """``trl.SFTTrainer`` with experts spread over ranks."""


class FSDPTurboDPOTrainer(FSDPTurboTrainerMixin, DPOTrainer):
    """``trl.DPOTrainer`` with experts spread over ranks; ``ref_model`` may be a path too, and is sharded."""


class FSDPTurboRewardTrainer(FSDPTurboTrainerMixin, RewardTrainer):
    """``trl.RewardTrainer`` with experts spread over ranks; a fresh ``score`` head starts as in one process."""

    scalars_are_means = True  # accuracy and margin; token counts are gathered in training only
