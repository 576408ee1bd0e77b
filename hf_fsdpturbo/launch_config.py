"""What the launcher left for us: the only reader of the environment and of the accelerate YAML.

Note [our keys in the accelerate YAML]: accelerate refuses top-level keys it does not know and drops nested ones, so ours
ride in the ``fsdp_config`` block as ``fsdp_turbo_<field>`` and this file reads the YAML a second time. Which YAML that is
only the ``accelerate launch`` process knows: it is an ancestor of ours, and its command line says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

ENV_PREFIX = "FSDPTURBO_"
YAML_PREFIX = "fsdp_turbo_"
CONFIG_VARIABLE = "FSDPTURBO_ACCELERATE_CONFIG"

# Types under which accelerate starts one process a device and leaves the model alone.
_USABLE_TYPES = ("MULTI_GPU", "MULTI_NPU", "NO")
# Launcher flags that hand the model to somebody else. argparse destination -> what it is called in the error.
_FOREIGN_FLAGS = {
    "use_deepspeed": "DeepSpeed",
    "use_fsdp": "accelerate's FSDP",
    "use_megatron_lm": "Megatron-LM",
    "use_parallelism_config": "accelerate's parallelism_config",
    "tpu": "TPU",
}
# The same, as accelerate exports them to the processes it starts (torchrun users may set them by hand).
_FOREIGN_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "accelerate's FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "accelerate's parallelism_config",
}


@dataclass(frozen=True)
class LaunchConfig:
    """What the accelerate YAML of this run says.

    Attributes:
        path: absolute path of the YAML, or None when there is none.
        found_by: how it was found, for the summary.
        fields: our fields (``fsdp_turbo_`` removed), values as YAML has them.
        use_cpu: the YAML's top-level ``use_cpu``.
        mixed_precision: "no", "bf16", or None when neither the YAML nor the launch command says.
    """

    path: str | None = None
    found_by: str = "no accelerate launcher above this process"
    fields: dict[str, Any] = field(default_factory=dict)
    use_cpu: bool = False
    mixed_precision: str | None = None


# ---- the environment ----


def variable(name: str, default: str | None = None) -> str | None:
    """One environment variable."""
    return os.environ.get(name, default)


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set environment variables inside a ``with`` block (for libraries that take settings no other way); then restore."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise ValueError(f"The environment's {name} must be a whole number, but it is {text!r}. Correct or unset it.")
    return int(text)


def world_size() -> int:
    """``WORLD_SIZE`` as the launcher set it; 1 without a launcher."""
    return _integer("WORLD_SIZE", 1)


def rank() -> int:
    """``RANK`` as the launcher set it; 0 without a launcher."""
    return _integer("RANK", 0)


def local_rank() -> int:
    """``LOCAL_RANK`` as the launcher set it; 0 without a launcher."""
    return _integer("LOCAL_RANK", 0)


def local_world_size() -> int:
    """``LOCAL_WORLD_SIZE`` (processes on this machine) as the launcher set it; without one, :func:`world_size`."""
    return _integer("LOCAL_WORLD_SIZE", world_size())


def exported_mixed_precision() -> str | None:
    """``ACCELERATE_MIXED_PRECISION`` where it asks for something, in lower case; accelerate exports "no" unasked."""
    text = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    return None if text in ("", "no") else text


def environment_fields(valid: Sequence[str]) -> dict[str, str]:
    """Our settings in the environment: ``FSDPTURBO_<FIELD>`` -> text, by lower-case field name.

    Raises:
        ValueError: a variable with our prefix is no field, or is empty.
    """
    found: dict[str, str] = {}
    for name, text in os.environ.items():
        if not name.startswith(ENV_PREFIX) or name == CONFIG_VARIABLE:
            continue
        key = name.removeprefix(ENV_PREFIX).lower()
        if key not in valid:
            names = [CONFIG_VARIABLE, *(ENV_PREFIX + field_name.upper() for field_name in valid)]
            raise ValueError(f"Unknown params in the environment: {name}={text!r}. Valid ones: {sorted(names)}.")
        if not text.strip():
            raise ValueError(f"The environment's {name} is empty. Give it a value, or unset it.")
        found[key] = text
    return found


def refuse_foreign_environment() -> None:
    """Refuse what the launcher exported for another owner of the model, and compilation."""
    for name, what in _FOREIGN_VARIABLES.items():
        if (value := os.environ.get(name, "")).lower() in ("1", "true", "yes", "y", "t", "on"):
            raise ValueError(
                f"{name}={value} in the environment: {what} cannot be combined with hf_fsdpturbo. Unset it."
            )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() not in ("", "no"):
        raise ValueError(
            f"ACCELERATE_DYNAMO_BACKEND={backend} (dynamo_backend of the accelerate config): torch_compile is not "
            "supported by hf_fsdpturbo. Remove it."
        )
    precision = exported_mixed_precision()
    if precision not in (None, "bf16"):
        raise ValueError(
            f"ACCELERATE_MIXED_PRECISION={precision}: hf_fsdpturbo trains in bf16 or fp32. Use bf16 or no."
        )


# ---- the accelerate command above us ----


def launch_arguments(argv: Sequence[str]) -> list[str] | None:
    """The arguments of ``accelerate launch`` in a process' command line, or None if it is another program.

    Knows ``accelerate launch``, ``accelerate-launch``, both started through an interpreter, and
    ``python -m accelerate.commands.launch`` / ``python -m accelerate.commands.accelerate_cli launch``.
    """
    rest = list(argv)
    if rest and PurePath(rest[0]).name.lower().startswith(("python", "pypy")):
        rest = rest[1:]
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
            rest = rest[2:] if rest[0] in ("-W", "-X", "--check-hash-based-pycs") else rest[1:]
    if not rest:
        return None
    if rest[0] == "-m":
        name, rest = (rest[1] if len(rest) > 1 else ""), rest[2:]
    else:
        path = PurePath(rest[0])
        name, rest = path.name.removesuffix(".exe"), rest[1:]
        if path.parts[-3:-1] == ("accelerate", "commands"):  # ``-m`` is not always kept in the command line
            name = f"accelerate.commands.{path.stem}"
    if name in ("accelerate-launch", "accelerate.commands.launch"):
        return rest
    if name in ("accelerate", "accelerate.commands.accelerate_cli") and rest[:1] == ["launch"]:
        return rest[1:]
    return None


def nearest_accelerate() -> tuple[list[str], str] | None:
    """Arguments and working directory of the nearest ancestor that is ``accelerate launch``; None if there is none.

    An ancestor whose command line may not be read belongs to somebody else, so it is not our launcher.
    """
    import psutil

    for process in psutil.Process().parents():
        try:
            arguments = launch_arguments(process.cmdline())
            if arguments is not None:
                return arguments, process.cwd()
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return None


def read_launch_config(valid: Sequence[str]) -> LaunchConfig:
    """Find and read this run's accelerate YAML.

    Order: ``FSDPTURBO_ACCELERATE_CONFIG``; ``--config_file`` of the nearest accelerate ancestor (relative to that
    process' directory); accelerate's default file, where that ancestor takes it too.

    Args:
        valid: names of our fields; anything else after ``fsdp_turbo_`` is an error.

    Raises:
        ValueError: the file is missing or unreadable, or says something that hf_fsdpturbo cannot honour.
    """
    named = os.environ.get(CONFIG_VARIABLE)
    if named is not None:
        return _read_yaml(Path(named), f"{CONFIG_VARIABLE}={named}", valid, None)
    launcher = nearest_accelerate()
    if launcher is None:
        return LaunchConfig()
    arguments, directory = launcher
    parsed = _parse_launch(arguments)
    for flag, what in _FOREIGN_FLAGS.items():
        if getattr(parsed, flag, False):
            raise ValueError(
                f"accelerate launch --{flag}: {what} cannot be combined with hf_fsdpturbo. Drop the flag."
            )
    if parsed.config_file is not None:
        return _read_yaml(
            Path(directory, parsed.config_file), f"--config_file {parsed.config_file}", valid, parsed.mixed_precision
        )
    from accelerate.commands.config import default_config_file

    if Path(default_config_file).is_file() and not parsed.cpu:
        return _read_yaml(Path(default_config_file), "accelerate's default config", valid, parsed.mixed_precision)
    return LaunchConfig(found_by="accelerate launch without a config file", mixed_precision=parsed.mixed_precision)


def _parse_launch(arguments: list[str]) -> Any:
    from accelerate.commands.launch import launch_command_parser

    try:
        return launch_command_parser().parse_args(arguments)
    except SystemExit as error:
        raise ValueError(
            f"The command line of the accelerate launch above this process cannot be parsed: {arguments}. Name the config "
            f"file in {CONFIG_VARIABLE} instead."
        ) from error


# ---- the accelerate YAML ----


def _read_yaml(path: Path, found_by: str, valid: Sequence[str], precision_flag: str | None) -> LaunchConfig:
    import yaml
    from accelerate.commands.config.config_args import load_config_from_file

    path = path.expanduser().absolute()
    where = f"accelerate config {path}"
    if not path.is_file():
        raise ValueError(f"{found_by}: there is no such file ({path}). Correct the path.")
    try:
        config = load_config_from_file(str(path))
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"{where} cannot be read by accelerate: {error}") from error
    _refuse_foreign_config(config, where)
    if not isinstance(config.use_cpu, bool):
        raise ValueError(f"use_cpu must be true or false, but it is {config.use_cpu!r} in {where}.")
    precision = precision_flag or config.mixed_precision
    if precision is not None and str(precision).lower() not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={precision} in {where}: hf_fsdpturbo trains in bf16 or fp32. Use bf16 or no."
        )
    return LaunchConfig(
        path=str(path),
        found_by=found_by,
        fields=_our_fields(config.fsdp_config, where, valid),
        use_cpu=config.use_cpu,
        mixed_precision=None if precision is None else str(precision).lower(),
    )


def _refuse_foreign_config(config: Any, where: str) -> None:
    kind = str(getattr(config.distributed_type, "value", config.distributed_type))
    if str(getattr(config.compute_environment, "value", "")) != "LOCAL_MACHINE":
        raise ValueError(
            f"compute_environment={config.compute_environment} in {where}: only LOCAL_MACHINE is supported."
        )
    if kind not in _USABLE_TYPES:
        extra = " (accelerate starts one process only for it)" if kind == "MULTI_CPU" else ""
        raise ValueError(
            f"distributed_type={kind}{extra} in {where} cannot be combined with hf_fsdpturbo, which shards the model "
            "itself. Use MULTI_GPU or MULTI_NPU; on CPU, MULTI_GPU with use_cpu: true."
        )
    blocks = {"parallelism_config": "cp_size, mp_replicate_size", "deepspeed_config": "", "megatron_lm_config": ""}
    for block, ours in blocks.items():
        if value := getattr(config, block, None):
            instead = f" Ours are fsdp_turbo_<field> in fsdp_config: {ours}." if ours else ""
            raise ValueError(f"{block}={value} in {where} cannot be combined with hf_fsdpturbo. Remove it.{instead}")
    backend = str((config.dynamo_config or {}).get("dynamo_backend", "no"))
    if backend.lower() != "no":
        raise ValueError(f"dynamo_backend={backend} in {where}: torch_compile is not supported. Remove it.")


def _our_fields(block: dict[str, Any], where: str, valid: Iterable[str]) -> dict[str, Any]:
    foreign = sorted(key for key in block if not key.startswith(YAML_PREFIX))
    if foreign:
        raise ValueError(
            f"fsdp_config {foreign[0]}={block[foreign[0]]!r} in {where} is accelerate's own FSDP setting, and FSDP is ours "
            f"here. Remove {foreign}; only {YAML_PREFIX}<field> keys belong there."
        )
    fields = {key.removeprefix(YAML_PREFIX): value for key, value in block.items()}
    unknown = sorted(key for key in fields if key not in list(valid))
    if unknown:
        names = sorted(YAML_PREFIX + name for name in valid)
        raise ValueError(
            f"Unknown params in fsdp_config of {where}: {[YAML_PREFIX + key for key in unknown]}. Valid ones: {names}. "
            f"Fields of dist_config go inside {YAML_PREFIX}dist_config."
        )
    return fields
