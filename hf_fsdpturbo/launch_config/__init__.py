"""What the launcher left for us: the only reader of the environment and of the accelerate YAML.

Note [our keys in the accelerate YAML]: accelerate refuses top-level keys it does not know and drops nested ones, so
ours ride in the ``fsdp_config`` block as ``fsdp_turbo_<field>`` and the YAML is read a second time here. Which YAML
that is only the ``accelerate launch`` process knows: it is an ancestor of ours, and its command line says.
"""

from __future__ import annotations

from pathlib import Path

from hf_fsdpturbo.launch_config.accelerate_yaml import YAML_PREFIX, LaunchConfig, read_yaml
from hf_fsdpturbo.launch_config.environment import (
    CONFIG_VARIABLE,
    ENV_PREFIX,
    environment_fields,
    exported_mixed_precision,
    local_rank,
    local_world_size,
    rank,
    refuse_foreign_environment,
    set_environment_default,
    variable,
    variables,
    world_size,
)
from hf_fsdpturbo.launch_config.launcher import (
    launch_arguments,
    nearest_accelerate,
    parse_launch,
    refuse_foreign_flags,
)

__all__ = [
    "CONFIG_VARIABLE",
    "ENV_PREFIX",
    "YAML_PREFIX",
    "LaunchConfig",
    "environment_fields",
    "exported_mixed_precision",
    "launch_arguments",
    "local_rank",
    "local_world_size",
    "nearest_accelerate",
    "rank",
    "read_launch_config",
    "refuse_foreign_environment",
    "set_environment_default",
    "variable",
    "variables",
    "world_size",
]


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
