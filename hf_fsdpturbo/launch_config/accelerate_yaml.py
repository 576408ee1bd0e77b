"""The accelerate YAML: what it says to us, and what in it hf_fsdpturbo cannot honour."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_fsdpturbo.bounded import cut, read_settings

YAML_PREFIX = "fsdp_turbo_"

# Types under which accelerate starts one process a device and leaves the model alone.
_BLOCKS = ("fsdp_config", "dynamo_config", "deepspeed_config", "megatron_lm_config", "parallelism_config")
_USABLE_TYPES = ("MULTI_GPU", "MULTI_NPU", "NO")


@dataclass(frozen=True)
class LaunchConfig:
    """What the accelerate YAML of this run says.

    Attributes:
        path: absolute path of the YAML, or None when there is none.
        found_by: how it was found, for the summary.
        fields: our keys (``fsdp_turbo_`` removed), values as YAML has them; not yet checked.
        use_cpu: the YAML's top-level ``use_cpu``.
        distributed_type: as accelerate names it, or None when there is no YAML.
        mixed_precision: "no", "bf16", or None when neither the YAML nor the launch command says.
    """

    path: str | None = None
    found_by: str = "no accelerate launcher above this process"
    fields: dict[str, Any] = field(default_factory=dict)
    use_cpu: bool = False
    mixed_precision: str | None = None
    distributed_type: str | None = None


def read_yaml(path: Path, found_by: str, precision_flag: str | None) -> LaunchConfig:
    from accelerate.commands.config.config_args import load_config_from_file

    path = path.expanduser().absolute()
    where = f"accelerate config {path}"
    if not path.is_file():
        raise ValueError(f"{found_by}: there is no such file ({path}). Correct the path.")
    read_plain(path)
    try:
        config = load_config_from_file(str(path))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{where} cannot be read by accelerate: {_short(error)}") from error
    _refuse_foreign_config(config, where)
    if not isinstance(config.use_cpu, bool):
        raise ValueError(f"use_cpu must be true or false, but it is {cut(config.use_cpu)} in {where}.")
    precision = precision_flag or config.mixed_precision
    if precision is not None and str(precision).lower() not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={_short(precision)} in {where}: hf_fsdpturbo trains in bf16 or fp32. Use bf16 or no."
        )
    return LaunchConfig(
        path=str(path),
        found_by=found_by,
        fields=_our_fields(config.fsdp_config, where),
        use_cpu=config.use_cpu,
        mixed_precision=None if precision is None else str(precision).lower(),
        distributed_type=_kind(config),
    )


def _kind(config: Any) -> str:
    return str(getattr(config.distributed_type, "value", config.distributed_type))
def read_plain(path: Path) -> dict[str, Any]:
    """The file by our own reader, which accelerate's would not refuse so clearly: keys twice, bombs, wrong kinds.

    Raises:
        ValueError: naming the file, and line, key or block.
    """
    where = f"accelerate config {path}"
    try:
        content = read_settings(str(path))
    except (ValueError, OSError) as error:
        raise ValueError(f"accelerate config cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{where} must be a YAML mapping of names to values, but it is {cut(content)}. Correct it.")
    for block in _BLOCKS:
        value = content.get(block)
        if value is not None and not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
            raise ValueError(f"{block} must be a mapping of names, but it is {cut(value)} in {where}. Correct it.")
    return content


def _short(value: object) -> str:
    return cut(str(value))[1:-1]


def _refuse_foreign_config(config: Any, where: str) -> None:
    kind = _kind(config)
    if str(getattr(config.compute_environment, "value", "")) != "LOCAL_MACHINE":
        raise ValueError(
            f"compute_environment={_short(config.compute_environment)} in {where}: only LOCAL_MACHINE is supported."
        )
    if kind not in _USABLE_TYPES:
        extra = " (accelerate starts one process only for it)" if kind == "MULTI_CPU" else ""
        raise ValueError(
            f"distributed_type={_short(kind)}{extra} in {where} cannot be combined with hf_fsdpturbo, which shards "
            "the model itself. Use MULTI_GPU or MULTI_NPU; on CPU, MULTI_GPU with use_cpu: true."
        )
    blocks = {"parallelism_config": "cp_size, mp_replicate_size", "deepspeed_config": "", "megatron_lm_config": ""}
    for block, ours in blocks.items():
        if value := getattr(config, block, None):
            instead = f" Ours are fsdp_turbo_<field> in fsdp_config: {ours}." if ours else ""
            raise ValueError(
                f"{block}={cut(value)} in {where} cannot be combined with hf_fsdpturbo. Remove it.{instead}"
            )
    backend = str((config.dynamo_config or {}).get("dynamo_backend", "no"))
    if backend.lower() != "no":
        raise ValueError(f"dynamo_backend={_short(backend)} in {where}: torch_compile is not supported. Remove it.")


def _our_fields(block: dict[str, Any], where: str) -> dict[str, Any]:
    foreign = sorted(key for key in block if not key.startswith(YAML_PREFIX))
    if foreign:
        first = f"fsdp_config {_short(foreign[0])}={cut(block[foreign[0]])} in {where}"
        ours = [key for key in foreign if not key.startswith("fsdp_")]  # accelerate's own keys begin so
        if ours:
            spelled = ", ".join(f"{YAML_PREFIX}{key}" for key in ours)
            raise ValueError(
                f"fsdp_config {ours[0]}={block[ours[0]]!r} in {where} is no key of the accelerate config: settings of "
                f"hf_fsdpturbo are spelled {YAML_PREFIX}<field> there. Write {spelled}."
            )
        raise ValueError(
            f"{first} is accelerate's own FSDP setting, and FSDP is ours here. Remove {foreign}; only "
            f"{YAML_PREFIX}<field> keys belong there."
        )
    return {key.removeprefix(YAML_PREFIX): value for key, value in block.items()}
