"""TRL's trainers and configs with the mixin in front: two names to change, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from trl import SFTConfig, SFTTrainer

from hf_fsdpturbo.arguments import FSDPTurboArguments
from hf_fsdpturbo.trainer import FSDPTurboTrainerMixin


@dataclass
class FSDPTurboSFTConfig(FSDPTurboArguments, SFTConfig):
    """``trl.SFTConfig`` with the fields of :class:`FSDPTurboArguments`."""


class FSDPTurboSFTTrainer(FSDPTurboTrainerMixin, SFTTrainer):
    """``trl.SFTTrainer`` with experts spread over ranks."""
