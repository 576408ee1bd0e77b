"""Reward modelling with expert parallelism: TRL's own ``trl reward`` script with our two classes in it."""

from __future__ import annotations

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from hf_fsdpturbo.commands.train import run
from hf_fsdpturbo.trl_configs import FSDPTurboRewardConfig, RecipeParser


def make_parser() -> TrlParser:
    """The recipe's arguments, TRL's and ours."""
    return RecipeParser((ScriptArguments, FSDPTurboRewardConfig, ModelConfig, DatasetMixtureConfig))


def main() -> None:
    """Train with the command line's arguments."""
    from hf_fsdpturbo.trl import FSDPTurboRewardTrainer  # late: TRL's trainer, which the parser does without

    run(make_parser, FSDPTurboRewardTrainer)


if __name__ == "__main__":
    main()
