"""What the launcher left for us: the only reader of the environment and of the accelerate YAML.

Note [our keys in the accelerate YAML]: accelerate refuses top-level keys it does not know and drops nested ones, so
ours ride in the ``fsdp_config`` block as ``fsdp_turbo_<field>`` and the YAML is read a second time here. Which YAML
that is only the ``accelerate launch`` process knows: it is an ancestor of ours, and its command line says.
"""

from __future__ import annotations

from hf_fsdpturbo.launch_config.accelerate_yaml import YAML_PREFIX, LaunchConfig
from hf_fsdpturbo.launch_config.environment import (
    CONFIG_VARIABLE,
    ENV_PREFIX,
    begin_afresh,
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
from hf_fsdpturbo.launch_config.launch import read_launch_config
from hf_fsdpturbo.launch_config.launcher import launch_arguments, nearest_accelerate

__all__ = [
    "CONFIG_VARIABLE",
    "ENV_PREFIX",
    "YAML_PREFIX",
    "LaunchConfig",
    "begin_afresh",
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
