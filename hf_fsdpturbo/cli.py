"""The command line: ``hf-fsdpturbo COMMAND ...``; each command parses the rest of the line itself."""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from hf_fsdpturbo import __version__
from hf_fsdpturbo.bounded import cut
from hf_fsdpturbo.one_line import refuse


class Command(NamedTuple):
    """A module with ``main``, what ``main`` takes before the words, and a line of help."""

    module: str
    before: tuple[str, ...]
    help: str


_LAUNCHED = "hf_fsdpturbo.commands.launched"
COMMANDS = {
    "sft": Command(_LAUNCHED, ("sft",), "supervised fine-tuning, launched on all devices"),
    "dpo": Command(_LAUNCHED, ("dpo",), "preference optimisation, launched on all devices"),
    "reward": Command(_LAUNCHED, ("reward",), "reward modelling, launched on all devices"),
    "plan": Command("hf_fsdpturbo.plan.command", (), "GiB a rank of a layout, or the layouts that fit"),
    "verify": Command("hf_fsdpturbo.commands.verify_door", (), "your model and layout, small, against one process"),
    "configs": Command("hf_fsdpturbo.commands.configs", (), "the shipped launch files: list, print, copy"),
    "doctor": Command("hf_fsdpturbo.commands.doctor_door", (), "is this machine ready?"),
    "convert": Command("hf_fsdpturbo.commands.convert_door", (), "a LlamaFactory YAML as a recipe and a launch file"),
    "report": Command("hf_fsdpturbo.commands.report_door", (), "draw the expert load of a run again"),
    "export": Command("hf_fsdpturbo.commands.export_door", (), "write a checkpoint in Hugging Face format"),
    "merge": Command("hf_fsdpturbo.commands.merge_door", (), "merge a LoRA adapter into its base, without a GPU"),
}
PROG = "hf-fsdpturbo"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; 2 for wrong input."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name == "--version":
        print(f"hf_fsdpturbo {__version__}")
        return 0
    if name not in COMMANDS:
        refuse(PROG, f"argument COMMAND: {name!r} is no command; there are {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    try:
        return int(importlib.import_module(command.module).main(*command.before, words[1:]) or 0)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        refuse(f"{PROG} {name}", f"{error.strerror}: {cut(error.filename)}")


def help_text() -> str:
    """What ``--help`` says."""
    lines = [f"usage: {PROG} COMMAND ... | --version", "", "Expert parallelism for Hugging Face trainers.", ""]
    lines += [f"  {name:<8}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", f"{PROG} COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
