"""What every rank will say of a run's settings, said once by the process that launches them: no torch, no TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_fsdpturbo import launch_config
from hf_fsdpturbo.arguments.command_line import settings_on_line, words_by_name
from hf_fsdpturbo.arguments.least_numbers import LEAST, refuse_numbers
from hf_fsdpturbo.arguments.resolved import resolved_from
from hf_fsdpturbo.arguments.setting_texts import from_line
from hf_fsdpturbo.arguments.sources import PUBLIC_DEFAULTS, merged, sizes_of
from hf_fsdpturbo.arguments.unsupported import refuse_backend_fields
from hf_fsdpturbo.topology import Topology


def check_before_ranks(
    words: Sequence[str], recipe: Mapping[str, Any], launch: launch_config.LaunchConfig, world: int | None
) -> None:
    """Look at our fields, from every source, and at numbers of TRL's configs.

    Args:
        words: the recipe's command line.
        recipe: the YAML of ``--config``.
        launch: the accelerate YAML.
        world: processes over all machines; None: not known, and sizes are not compared with it.

    Raises:
        ValueError: in the words of a rank.
    """
    written = {name: _value(name, value) for name, value in recipe.items() if name in PUBLIC_DEFAULTS}
    exported = recipe.get("env") if isinstance(recipe.get("env"), dict) else None
    ours = {str(k): str(v) for k, v in (exported or {}).items() if str(k).startswith(launch_config.ENV_PREFIX)}
    with launch_config.variables(**ours):  # TRL's parser exports them
        settings = merged({**written, **settings_on_line(words)}, launch, on_accelerator=False)
    refuse_backend_fields(resolved_from(settings, settings, launch).params, settings["recompute"].value)
    if world is not None:
        Topology.resolve(world, **sizes_of(settings, world))
    given = {**recipe, **words_by_name(words)}
    refuse_numbers({name: _number(given[name]) for name in LEAST if name in given})


def _value(name: str, value: Any) -> Any:
    return from_line(name, value) if isinstance(value, str) else value


def _number(value: Any) -> Any:
    """Of text, the number; what is none is named by TRL's parser."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number
