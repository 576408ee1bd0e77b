"""``hf-fsdpturbo sft | dpo | reward``: check the words, then become ``accelerate launch`` of the recipe.

The process is replaced (``exec``), not wrapped: signals, exit status and the search for the launcher's YAML among a
rank's ancestors stay those of ``accelerate launch``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_fsdpturbo.arguments.before_ranks import check_before_ranks
from hf_fsdpturbo.arguments.yaml_fields import check_yaml_fields
from hf_fsdpturbo.commands.launch_options import accelerate_words, make_parser
from hf_fsdpturbo.commands.recipe_words import (
    RECIPES,
    check_by_parser,
    check_early,
    help_parsers,
    read_recipe,
    with_shipped_recipe,
)
from hf_fsdpturbo.launch_config import CONFIG_VARIABLE, LaunchConfig, variable
from hf_fsdpturbo.launch_config.early_check import LaunchFile, read_early
from hf_fsdpturbo.launch_config.slurm import SlurmStep, slurm_step
from hf_fsdpturbo.one_line import refuse

NODE = 8  # devices of a machine, as the shipped recipes have it
DESCRIPTIONS = {
    "sft": "Supervised fine-tuning, as trl sft, with experts spread over devices.",
    "dpo": "Preference optimisation, as trl dpo, with experts spread over devices.",
    "reward": "Reward modelling, as trl reward, with experts spread over devices.",
}


def main(name: str, argv: Sequence[str]) -> int:
    """Check and launch; returns only where ``--help`` was asked for."""
    prog = f"hf-fsdpturbo {name}"
    parser = make_parser(prog, DESCRIPTIONS[name])
    if {"-h", "--help"} & set(argv):
        parser.print_help()
        ours, theirs = help_parsers(name)
        print(f"\narguments of hf_fsdpturbo:\n{ours.format_help()}\narguments of TRL:\n{theirs.format_help()}")
        return 0
    options, words = parser.parse_known_args(list(argv))
    try:
        command = launch_command(name, options, words)
    except ValueError as error:
        refuse(prog, error)
    sys.stdout.flush()
    os.execv(command[0], command)


def launch_command(name: str, options: argparse.Namespace, words: list[str]) -> list[str]:
    """The command line of ``accelerate launch``, everything checked that can be without a rank.

    Raises:
        ValueError: naming the argument.
    """
    file = _checked_file(options)
    step = None if options.nnodes else slurm_step()
    words, devices = with_shipped_recipe(name, words)
    if devices is not None and file is None:
        options = with_devices(options, devices, step)
    launch, world = accelerate_words(options, file, step)
    recipe = read_recipe(words)
    check_early(words, recipe)
    check_before_ranks(words, recipe, _launch_config(file), world)
    check_by_parser(name, words, recipe)
    if file:
        from hf_fsdpturbo.launch_config.accelerate_yaml import read_yaml

        read_yaml(file.path, "--accelerate_config", None)  # what accelerate itself refuses
    return [sys.executable, "-m", "accelerate.commands.launch", *launch, "--module", RECIPES[name], *words]


def with_devices(options: argparse.Namespace, devices: int, step: SlurmStep | None) -> argparse.Namespace:
    """The options with the processes of a shipped recipe, eight a machine, where the line names none.

    Raises:
        ValueError: the line names another number of devices, or too few machines.
    """
    nnodes = options.nnodes or (step.nnodes if step else 1)
    nproc = options.nproc or min(NODE, devices)
    if nproc * nnodes != devices:
        raise ValueError(
            f"--nnodes: the recipe is for {devices} devices, but --nproc {nproc} on {nnodes} machine(s) are "
            f"{nproc * nnodes}. Give --nnodes and --nproc for {devices}, or copy the recipe and change it."
        )
    return argparse.Namespace(**{**vars(options), "nproc": nproc})


def _launch_config(file: LaunchFile | None) -> LaunchConfig:
    """The accelerate YAML that ranks will read our fields from.

    Raises:
        ValueError: as :func:`read_early`.
    """
    named = variable(CONFIG_VARIABLE)
    file = file if named is None else read_early(Path(named))
    return LaunchConfig() if file is None else file.config


def _checked_file(options: argparse.Namespace) -> LaunchFile | None:
    if options.accelerate_config is None:
        return None
    try:
        file = read_early(options.accelerate_config)
        check_yaml_fields(file.fields, file.path)
    except ValueError as error:
        raise ValueError(f"--accelerate_config: {error}") from error
    return file
