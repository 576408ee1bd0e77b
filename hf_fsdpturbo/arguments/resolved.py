"""What the arguments worked out of their sources, beside the fields that users see."""

from __future__ import annotations

from dataclasses import dataclass

from hf_fsdpturbo import launch_config
from hf_fsdpturbo.arguments.params import FSDPTurboParams, InitParams, KernelParams
from hf_fsdpturbo.arguments.sources import Setting, dist_values


@dataclass(frozen=True)
class Resolved:
    """What ``__post_init__`` worked out; not a field, so it is neither logged nor asked for on the command line."""

    settings: dict[str, Setting]  # as written, for any world size
    effective: dict[str, Setting]  # as used by this run
    launch: launch_config.LaunchConfig
    params: FSDPTurboParams
    kernels: KernelParams | None
    init: InitParams


def resolved_from(
    written: dict[str, Setting], used: dict[str, Setting], launch: launch_config.LaunchConfig
) -> Resolved:
    """The checked parameter groups of the settings that are used.

    Raises:
        ValueError: a group has an unknown key or a value out of range.
    """
    kernels = used["kernel_config"].value
    return Resolved(
        settings=written,
        effective=used,
        launch=launch,
        params=FSDPTurboParams(**dist_values(used)),
        kernels=None if kernels is None else KernelParams.from_mapping(kernels),
        init=InitParams.from_mapping(used["init_config"].value),
    )
