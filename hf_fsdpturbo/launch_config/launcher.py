"""The ``accelerate launch`` process above us: found among our ancestors, its command line read as accelerate does."""

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


# Programs that run another one in their own process, and their options that take the next word as their value (of an
# option that ends in "-", any continuation).
_RUNNERS = {
    "debugpy": ("--listen", "--connect", "--log-to", "--adapter-access-token", "--parent-session-pid", "--configure-"),
    "coverage": (
        "--concurrency", "--context", "--data-file", "--debug", "--include", "--omit", "--rcfile", "--save-signal",
        "--source",
    ),
}  # fmt: skip
_INTERPRETER_OPTIONS = ("-W", "-X", "--check-hash-based-pycs")


def launch_arguments(argv: Sequence[str]) -> list[str] | None:
    """The arguments of ``accelerate launch`` in a process' command line, or None if it is another program.

    Knows ``accelerate launch``, ``accelerate-launch``, both started through an interpreter,
    ``python -m accelerate.commands.launch`` / ``python -m accelerate.commands.accelerate_cli launch``, and each of
    these run by debugpy or coverage.
    """
    rest = list(argv)
    if rest and PurePath(rest[0]).name.lower().startswith(("python", "pypy")):
        rest = _after_options(rest[1:], _INTERPRETER_OPTIONS)
    while (target := _target(rest)) is not None:
        name, rest = target
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return rest
        if name in ("accelerate", "accelerate.commands.accelerate_cli"):
            return rest[1:] if rest[:1] == ["launch"] else None
        if name not in _RUNNERS:
            return None
        if name == "coverage":
            if rest[:1] != ["run"]:
                return None
            rest = rest[1:]
        rest = _after_options(rest, _RUNNERS[name])
    return None


def _after_options(words: list[str], with_value: tuple[str, ...]) -> list[str]:
    """``words`` from the program on: a path, or ``-m`` and a module."""
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-", "--module", "--pid"):
        separate = any(words[0] == name or (name[-1] == "-" and words[0].startswith(name)) for name in with_value)
        words = words[2:] if separate and "=" not in words[0] else words[1:]
    return words


def _target(words: list[str]) -> tuple[str, list[str]] | None:
    """(name of a program or module, its arguments)."""
    if not words:
        return None
    if words[0] in ("-m", "--module"):
        name, rest = (words[1] if len(words) > 1 else ""), words[2:]
        return name.removesuffix(".__main__"), rest
    path = PurePath(words[0])
    name = path.name.removesuffix(".exe")
    if path.parts[-3:-1] == ("accelerate", "commands"):  # ``-m`` is not always kept in the command line
        name = f"accelerate.commands.{path.stem}"
    elif path.name == "__main__.py" and len(path.parts) > 1:  # a package run by its path, as IDEs do
        name = path.parts[-2]
    return name, words[1:]


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
