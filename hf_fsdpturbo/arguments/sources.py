"""Where each setting comes from: command line / Python > environment > accelerate YAML > default.

Settings are merged one by one: each public field by its name, each key of ``dist_config`` as ``dist_config.<key>``
(``ep_size`` and ``ep_dispatcher`` are short for two of them); ``kernel_config`` and ``init_config`` go as a whole.

Note [what counts as given in Python]: every value but the default object itself (``defaults.py``), so ``cp_size=1`` in
Python, on the command line or in a TRL recipe beats the YAML's 2. What counts as left out: None, which therefore
cannot switch off a ``dp_size``, ``mp_shard_size`` or ``kernel_config`` of the environment or the YAML; and the field's
default object taken from the class (``cp_size=Arguments.cp_size``). ``cp_mode`` has one value, so nothing is told
apart. A value equal to what the next source below says is put down to that source. This keeps the record right when
arguments are copied (``dataclasses.replace``, JSON), as a copy passes every value again: none of them becomes "given".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_fsdpturbo.arguments.defaults import is_given
from hf_fsdpturbo.arguments.mappings import parse_mapping
from hf_fsdpturbo.arguments.params import (
    FSDPTurboParams,
    InitParams,
    KernelParams,
    check_dist_keys,
    check_type,
    unknown_params,
)
from hf_fsdpturbo.arguments.real_numbers import check_real
from hf_fsdpturbo.arguments.setting_texts import BOOLEANS, INTEGERS, from_environment
from hf_fsdpturbo.bounded import cut
from hf_fsdpturbo.launch_config import ENV_PREFIX, YAML_PREFIX, LaunchConfig, environment_fields, read_launch_config
from hf_fsdpturbo.topology import at_most, positive

PYTHON = "command line / Python"
ENVIRONMENT = "environment"
YAML = "accelerate YAML"
DEFAULT = "default"

DISPATCHER = "dist_config.ep_dispatcher"
SHORTHAND = ("ep_size", "ep_dispatcher")
REALS = ("router_bias_update_rate", "router_lr_scale")
# Public fields with their defaults in force; FSDPTurboArguments' fields have equal ones (tested), marked as unset.
PUBLIC_DEFAULTS: dict[str, Any] = {
    "dist_config": None,
    "ep_size": None,
    "ep_dispatcher": None,
    "dp_size": None,
    "cp_size": 1,
    "cp_mode": "ulysses",
    "mp_replicate_size": 1,
    "mp_shard_size": None,
    "ranks_per_node": None,
    "dist_timeout": None,
    "hang_timeout": None,
    "kernel_config": None,
    "init_config": {"name": "init_on_meta"},
    "drop_unused_tensors": False,
    "check_loading": "sample",
    "optim_implementation": "auto",
    "recompute": "full",
    "fused_linear_cross_entropy": "auto",
    "checkpoint_format": None,
    "on_nonfinite": "warn",
    "verify_checkpoint": True,
    "save_quantized": False,
    "fsdpturbo_metrics": None,
    "router_bias_update_rate": None,
    "router_lr_scale": 1.0,
    "freeze_routers": False,
}
CHOICES: dict[str, tuple[str, ...]] = {
    "check_loading": ("sample", "full", "off"),
    "checkpoint_format": ("dcp", "hub", "both"),
    "optim_implementation": ("auto", "fsdpturbo", "torch"),
    "recompute": ("full", "selective"),
    "fused_linear_cross_entropy": ("auto", "on", "off"),
    "on_nonfinite": ("warn", "skip", "stop"),
}
# Sizes that shrink to this when one process runs a file written for many.
ONE_PROCESS: dict[str, int | None] = {
    "dist_config.ep_size": 1,
    "dist_config.efsdp_size": None,
    "dp_size": None,
    "cp_size": 1,
    "mp_replicate_size": 1,
    "mp_shard_size": None,
    "ranks_per_node": None,
}
# Settings without effect where nothing is sharded or exchanged. Sizes are not here: those that do not fit raise.
NEEDS_PROCESSES = (
    "dist_config.reshard_after_forward",
    "dist_config.offload_params",
    "dist_config.fsdp_ignored_modules",
    "dist_config.hook_modules",
    "dist_config.fsdp_implementation",
    "dist_config.ep_backend",
    "dist_timeout",
    "hang_timeout",
    "init_config",
    "check_loading",
)


@dataclass(frozen=True)
class Setting:
    """One resolved value, and the source it came from (one of the four constants above)."""

    value: Any
    source: str


def resolve_settings(given: Mapping[str, Any], use_cpu: bool = False) -> tuple[dict[str, Setting], LaunchConfig]:
    """Merge the four sources.

    Args:
        given: public fields as the dataclass holds them.
        use_cpu: whether the run leaves an accelerator alone that is there.

    Returns:
        every setting (public fields but ``dist_config`` and the shorthands, and ``dist_config.<key>``), and the launch
        configuration that was found.

    Raises:
        ValueError: a source contradicts itself, or holds an unknown key, a wrong type or a value out of range.
    """
    launch = read_launch_config()
    return merged(given, launch, not (use_cpu or launch.use_cpu) and _has_accelerator()), launch


def merged(given: Mapping[str, Any], launch: LaunchConfig, on_accelerator: bool) -> dict[str, Setting]:
    """As :func:`resolve_settings`, with a launch configuration that was found; ``given`` may lack fields.

    Raises:
        ValueError: as :func:`resolve_settings`.
    """
    python = {name: given[name] for name in PUBLIC_DEFAULTS if is_given(given.get(name))}
    texts = _known(environment_fields(), "the environment", lambda name: ENV_PREFIX + name.upper())
    environment = {name: from_environment(name, text) for name, text in texts.items()}
    yaml_fields = _known(launch.fields, f"fsdp_config of {launch.path}", lambda name: YAML_PREFIX + name)
    layers = [
        (PYTHON, _flatten(python, PYTHON)),
        (ENVIRONMENT, _flatten(environment, f"{ENVIRONMENT}, {ENV_PREFIX}...")),
        (YAML, _flatten(yaml_fields, f"{launch.path}, {YAML_PREFIX}...")),
        (DEFAULT, _defaults(on_accelerator)),
    ]
    return _with_librarys_default({key: _pick(key, layers) for key in layers[-1][1]})


def _has_accelerator() -> bool:
    import torch  # late: reading settings costs no second of imports

    return torch.accelerator.is_available()


def _defaults(on_accelerator: bool) -> dict[str, Any]:
    """Defaults in force; the dispatcher is ``auto`` on an accelerator, ``eager``, which is slow there, on CPU."""
    public = {k: v for k, v in PUBLIC_DEFAULTS.items() if k not in ("dist_config", *SHORTHAND)}
    dist = {f"dist_config.{key}": value for key, value in FSDPTurboParams().to_dict().items()}
    return {**public, **dist, **({DISPATCHER: "auto"} if on_accelerator else {})}


def _with_librarys_default(settings: dict[str, Setting]) -> dict[str, Setting]:
    """The library of ``ep_backend: fsdp_turbo`` knows no ``auto``: its default is ``eager`` everywhere."""
    upstream = settings["dist_config.ep_backend"].value == "fsdp_turbo"
    if upstream and settings[DISPATCHER].source == DEFAULT:
        settings[DISPATCHER] = Setting("eager", DEFAULT)
    return settings


def _pick(key: str, layers: list[tuple[str, dict[str, Any]]]) -> Setting:
    """The value of the highest layer that has ``key``; see the note for whom it is put down to."""
    having = [(source, values[key]) for source, values in layers if key in values]
    source, value = having[0]
    if source == PYTHON and having[1][1] == value:
        source = having[1][0]
    return Setting(value, source)


def _known(values: Mapping[str, Any], where: str, label: Callable[[str], str]) -> Mapping[str, Any]:
    """``values`` if every name is a public field; else ``Unknown params ...``, spelled as the user wrote them."""
    unknown = [name for name in values if name not in PUBLIC_DEFAULTS]
    if unknown:
        raise unknown_params(where, unknown, list(PUBLIC_DEFAULTS), label)
    return values


def _flatten(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check one source on its own and spread ``dist_config`` and the shorthands over ``dist_config.<key>``."""
    try:
        return _flatten_checked({name: value for name, value in values.items() if value is not None}, where)
    except ValueError as error:
        if where == PYTHON:
            raise
        raise ValueError(f"{error} (from {where})") from error


def _flatten_checked(values: dict[str, Any], where: str) -> dict[str, Any]:
    for name, value in values.items():
        if name in INTEGERS:
            check_type(name, value, int)
            positive(name, value)
            at_most(name, value)
        if name in BOOLEANS:
            check_type(name, value, bool)
    if (mode := values.get("cp_mode", "ulysses")) != "ulysses":
        raise ValueError(
            f"cp_mode must be 'ulysses', the only mode there is, but it is {cut(mode)}. Leave cp_mode out."
        )
    for name in REALS:
        if name in values:
            values[name] = check_real(name, values[name])
    for name in CHOICES:
        if name in values:
            values[name] = _check_choice(name, values[name])
    dist = parse_mapping("dist_config", values.pop("dist_config")) if "dist_config" in values else {}
    check_dist_keys(dist)
    for name in SHORTHAND:
        if name in values:
            short = values.pop(name)
            if name in dist and dist[name] != short:
                raise ValueError(
                    f"{name}={cut(short)} contradicts dist_config {name}={cut(dist[name])}, and both come from one "
                    f"source: {where}. Give {name} once, or the same value twice."
                )
            dist[name] = short
    FSDPTurboParams(**dist)  # checks types and values; the merged ones are built later
    for name, parse in (("kernel_config", KernelParams.from_mapping), ("init_config", InitParams.from_mapping)):
        if name in values:
            values[name] = parse_mapping(name, values[name])
            parse(values[name])
    return {**values, **{f"dist_config.{key}": value for key, value in dist.items()}}


def _check_choice(name: str, value: Any) -> str:
    """The value; False and True are ``off`` and ``on``, which YAML reads so.

    Raises:
        ValueError: not one of the choices.
    """
    choice = {False: "off", True: "on"}[value] if isinstance(value, bool) else value
    if choice not in CHOICES[name]:
        raise ValueError(f"{name} must be one of {list(CHOICES[name])}, but it is {cut(value)}. Correct it.")
    return str(choice)


def reduce_to_one_process(settings: Mapping[str, Setting]) -> tuple[dict[str, Setting], list[str]]:
    """For a run of one process: sizes from the environment or the YAML become 1; those given in Python stay.

    Returns:
        the new settings and the names of those that changed.
    """
    changed = [
        key
        for key, one in ONE_PROCESS.items()
        if settings[key].source in (ENVIRONMENT, YAML) and settings[key].value not in (None, one)
    ]
    reduced = {key: Setting(ONE_PROCESS[key], settings[key].source) for key in changed}
    return {**settings, **reduced}, changed


def sizes_of(settings: Mapping[str, Setting], world: int) -> dict[str, Any]:
    """Keyword arguments of ``Topology.resolve`` for a run of ``world`` processes; of one, as it is reduced."""
    if world == 1:
        settings, _ = reduce_to_one_process(settings)
    private = ("ep_size", "efsdp_size")
    public = ("dp_size", "cp_size", "mp_replicate_size", "mp_shard_size", "ranks_per_node")
    sizes = {name: settings[name].value for name in public}
    return {**sizes, **{name: settings[f"dist_config.{name}"].value for name in private}}


def without_effect_alone(settings: Mapping[str, Setting]) -> list[str]:
    """Settings given on the command line or in Python that change nothing in a run of one process.

    Those of the environment and the YAML are left out on purpose: a file written for many ranks may be tried on one.
    """
    return [f"{key}={settings[key].value!r}" for key in NEEDS_PROCESSES if settings[key].source == PYTHON]


def dist_values(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The ``dist_config`` part of the settings, as one mapping."""
    prefix = "dist_config."
    return {key.removeprefix(prefix): s.value for key, s in settings.items() if key.startswith(prefix)}
