"""The environment of this process: nothing else in the package reads or sets ``os.environ``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hf_fsdpturbo.bounded import cut

ENV_PREFIX = "FSDPTURBO_"
CONFIG_VARIABLE = "FSDPTURBO_ACCELERATE_CONFIG"

# What would take the model away from us, as accelerate exports it to the processes it starts; torchrun users may set
# it by hand. The same in flags and in a YAML: launcher.py and accelerate_yaml.py.
_FOREIGN_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "accelerate's FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "accelerate's parallelism_config",
}


def variable(name: str, default: str | None = None) -> str | None:
    """One environment variable."""
    return os.environ.get(name, default)


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set environment variables inside a ``with`` block, for libraries that take settings no other way."""
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


def set_environment_default(name: str, value: str) -> str:
    """Set a variable for the rest of the process unless the user has set it; return the value in force.

    For libraries that read a switch once, late, and offer no other way (flash-linear-attention's ``FLA_FLASH_QLA``).
    """
    return os.environ.setdefault(name, value)


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError(
            f"The environment's {name} must be a whole number, but it is {cut(text)}. Correct or unset it."
        )
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


def environment_fields() -> dict[str, str]:
    """Our settings in the environment: ``FSDPTURBO_<FIELD>`` -> text, by lower-case field name; not yet checked.

    Raises:
        ValueError: a name that is not in capitals: beside the one that is, it would be chance which one counts.
    """
    ours = {name: text for name, text in os.environ.items() if name.upper().startswith(ENV_PREFIX)}
    ours.pop(CONFIG_VARIABLE, None)
    for name in ours:
        if name != name.upper():
            raise ValueError(f"The environment's {cut(name)} must be written {cut(name.upper())}. Rename or unset it.")
    return {name.removeprefix(ENV_PREFIX).lower(): text for name, text in ours.items()}


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


_LAUNCHERS = ("FSDPTURBO_", "ACCELERATE_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def begin_afresh(values: Mapping[str, str]) -> None:
    """For a process that was forked to be a rank or none: what launchers and users set goes, ``values`` come."""
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS) or name in _RANKS]:
        del os.environ[name]
    os.environ.update(values)
