"""The accelerate YAML looked at without accelerate, whose import takes seconds: for commands, before they launch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hf_fsdpturbo.launch_config.accelerate_yaml import LaunchConfig, _our_fields, _refuse_foreign_config, read_plain


@dataclass(frozen=True)
class LaunchFile:
    """What a command needs of an accelerate YAML.

    Attributes:
        path: absolute path.
        num_processes: over all machines.
        num_machines: machines.
        machine_rank: which machine this is, as the YAML has it.
        main_process_ip: the first machine, or None.
        main_process_port: where it listens, or None.
        fields: our keys (``fsdp_turbo_`` removed), not yet checked.
    """

    path: Path
    num_processes: int
    num_machines: int
    machine_rank: int
    main_process_ip: str | None
    main_process_port: int | None
    fields: dict[str, Any]

    @property
    def config(self) -> LaunchConfig:
        """What a rank reads our fields from: path and fields; the rest is accelerate's, and not read here."""
        return LaunchConfig(path=str(self.path), fields=self.fields)


def read_early(path: Path) -> LaunchFile:
    """Read it, and refuse what our own reading refuses; what accelerate refuses besides, it says itself later.

    Raises:
        ValueError: no YAML, or a key that cannot be honoured.
    """
    path = path.absolute()
    raw, where = read_plain(path), f"accelerate config {path}"
    _refuse_foreign_config(
        SimpleNamespace(
            compute_environment=SimpleNamespace(value=raw.get("compute_environment", "LOCAL_MACHINE")),
            distributed_type=_text(raw.get("distributed_type", "NO")),
            parallelism_config=raw.get("parallelism_config"),
            deepspeed_config=raw.get("deepspeed_config"),
            megatron_lm_config=raw.get("megatron_lm_config"),
            dynamo_config=raw.get("dynamo_config") or {},
        ),
        where,
    )
    processes, machines = (_count(raw, name, where) for name in ("num_processes", "num_machines"))
    if processes % machines:
        raise ValueError(f"num_machines={machines} must divide num_processes={processes} in {where}.")
    ip, port = raw.get("main_process_ip"), raw.get("main_process_port")
    if port is not None and (not isinstance(port, int) or not 0 <= port < 65536):
        raise ValueError(f"main_process_port must be 0 to 65535, but it is {port!r} in {where}.")
    rank = raw.get("machine_rank", 0)
    return LaunchFile(path, processes, machines, rank, ip, port, _our_fields(raw.get("fsdp_config") or {}, where))


def _text(value: Any) -> str:
    return "NO" if value is False else str(value)  # YAML reads NO as false


def _count(raw: dict[str, Any], name: str, where: str) -> int:
    value = raw.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of 1 or more, but it is {value!r} in {where}.")
    return value
