"""Which accelerate YAML this run was launched with, and what it says."""

from __future__ import annotations

from pathlib import Path

from hf_fsdpturbo.launch_config.accelerate_yaml import LaunchConfig, read_yaml
from hf_fsdpturbo.launch_config.environment import CONFIG_VARIABLE, variable
from hf_fsdpturbo.launch_config.launcher import nearest_accelerate, parse_launch, refuse_foreign_flags


def read_launch_config() -> LaunchConfig:
    """Find and read this run's accelerate YAML.

    Order: ``FSDPTURBO_ACCELERATE_CONFIG``; ``--config_file`` of the nearest accelerate ancestor (relative to that
    process' directory); accelerate's default file, where that ancestor takes it too.

    Raises:
        ValueError: the file is missing or unreadable, or says something that hf_fsdpturbo cannot honour.
    """
    named = variable(CONFIG_VARIABLE)
    if named is not None:
        return read_yaml(Path(named), f"{CONFIG_VARIABLE}={named}", None)
    launcher = nearest_accelerate()
    if launcher is None:
        return LaunchConfig()
    arguments, directory = launcher
    parsed = parse_launch(arguments)
    refuse_foreign_flags(parsed)
    if parsed.config_file is not None:
        return read_yaml(
            Path(directory, parsed.config_file), f"--config_file {parsed.config_file}", parsed.mixed_precision
        )
    from accelerate.commands.config import default_config_file

    if Path(default_config_file).is_file() and not parsed.cpu:
        return read_yaml(Path(default_config_file), "accelerate's default config", parsed.mixed_precision)
    return LaunchConfig(found_by="accelerate launch without a config file", mixed_precision=parsed.mixed_precision)
