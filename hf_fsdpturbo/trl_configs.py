"""TRL's configs with our fields in front, and the parser of recipes: what a command line needs, without trainers.

Apart from ``trl.py``, since TRL's trainers are slow to import and a mistyped argument is refused before any is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trl import DPOConfig, RewardConfig, SFTConfig, TrlParser

from hf_fsdpturbo.arguments import FSDPTurboArguments, check_command_line


@dataclass
class FSDPTurboSFTConfig(FSDPTurboArguments, SFTConfig):
    """``trl.SFTConfig`` with the fields of :class:`FSDPTurboArguments`."""


@dataclass
class FSDPTurboDPOConfig(FSDPTurboArguments, DPOConfig):
    """``trl.DPOConfig`` with the fields of :class:`FSDPTurboArguments`."""


@dataclass
class FSDPTurboRewardConfig(FSDPTurboArguments, RewardConfig):
    """``trl.RewardConfig`` with the fields of :class:`FSDPTurboArguments`."""


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
