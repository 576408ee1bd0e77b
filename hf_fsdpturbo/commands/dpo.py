"""Preference optimisation (DPO) with expert parallelism: TRL's own ``trl dpo`` script with our two classes in it."""

from __future__ import annotations

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from hf_fsdpturbo.commands.train import run
from hf_fsdpturbo.trl_configs import FSDPTurboDPOConfig, RecipeParser


def make_parser() -> TrlParser:
    """The recipe's arguments, TRL's and ours."""
    return RecipeParser((ScriptArguments, FSDPTurboDPOConfig, ModelConfig, DatasetMixtureConfig))


def main() -> None:
    """Train with the command line's arguments."""
    from hf_fsdpturbo.trl import FSDPTurboDPOTrainer  # late: TRL's trainer, which the parser does without

    run(make_parser, FSDPTurboDPOTrainer)


if __name__ == "__main__":
    main()
