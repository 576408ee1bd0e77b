"""The `accelerate launch` process above us: found among our ancestors, its command line read as accelerate does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from hf_fsdpturbo.launch_config.environment import CONFIG_VARIABLE

# Launcher flags that hand the model to somebody else. argparse destination -> what it is called in the error.
_FOREIGN_FLAGS = {
    "use_deepspeed": "DeepSpeed",
    "use_fsdp": "accelerate's FSDP",
    "use_megatron_lm": "Megatron-LM",
    "use_parallelism_config": "accelerate's parallelism_config",
    "tpu": "TPU",
}


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

    Raises:
        ValueError: it is our launcher, but its working directory may not be read.
    """
    import psutil

    for process in psutil.Process().parents():
        try:
            arguments = launch_arguments(process.cmdline())
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if arguments is None:
            continue
        try:
            return arguments, process.cwd()
        except (psutil.AccessDenied, psutil.NoSuchProcess) as error:
            raise ValueError(
                f"The working directory of accelerate launch (process {process.pid}) cannot be read, so --config_file "
                f"cannot be found. Name the accelerate config in {CONFIG_VARIABLE}."
            ) from error
    return None


def parse_launch(arguments: list[str]) -> Any:
    """The launcher's arguments as accelerate's own parser reads them (an ``argparse.Namespace``).

    Raises:
        ValueError: they cannot be parsed, as when the launcher belongs to another accelerate release.
    """
    from accelerate.commands.launch import launch_command_parser

    try:
        return launch_command_parser().parse_args(arguments)
    except SystemExit as error:
        raise ValueError(
            f"The command line of the accelerate launch above this process cannot be parsed: {arguments}. Name the "
            f"accelerate config in {CONFIG_VARIABLE} instead."
        ) from error


def refuse_foreign_flags(parsed: Any) -> None:
    """Raise ValueError for launcher flags that hand the model to another library."""
    for flag, what in _FOREIGN_FLAGS.items():
        if getattr(parsed, flag, False):
            raise ValueError(f"accelerate launch --{flag}: {what} cannot be combined with hf_fsdpturbo. Drop it.")
