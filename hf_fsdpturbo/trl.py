"""TRL's trainers and configs with the mixin in front: two names to change, nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer, TrlParser

from hf_fsdpturbo.arguments import FSDPTurboArguments, check_command_line
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


class RecipeParser(TrlParser):
    """``trl.TrlParser`` that takes no shortened names, and a ``--config`` file only as our bounded reader reads it."""

    def __init__(self, dataclass_types: Any, **kwargs: Any) -> None:
        super().__init__(dataclass_types, **{"allow_abbrev": False, **kwargs})

    def parse_args_and_config(self, args: Iterable[str] | None = None, *more: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As TRL's.

        Raises:
            ValueError: the file is no mapping, has a key twice, or a number that YAML reads otherwise than it looks;
                names file, line and key.
        """
        given = sys.argv[1:] if args is None else list(args)
        check_command_line(given)
        return super().parse_args_and_config(given, *more, **kwargs)
