"""The command line: ``hf-fsdpturbo doctor [--json]``, ``hf-fsdpturbo export ...``, ``hf-fsdpturbo plan ...``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return the exit code; ``export`` parses the rest of the line itself."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["export"]:
        code = importlib.import_module("hf_fsdpturbo.export").main(arguments[1:])
        return int(code or 0)
    if arguments[:1] == ["plan"]:
        return int(importlib.import_module("hf_fsdpturbo.plan.command").main(arguments[1:]))
    parser = argparse.ArgumentParser(prog="hf-fsdpturbo", description="Expert parallelism for Hugging Face trainers.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="is this machine ready? versions, devices, operators, an exchange")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor.add_argument("--timeout", type=float, default=None, help="seconds a single check may take")
    commands.add_parser("export", help="write a checkpoint in Hugging Face format", add_help=False)
    commands.add_parser("plan", help="GiB a rank of a layout, or the layouts that fit", add_help=False)
    parsed = parser.parse_args(arguments)
    from hf_fsdpturbo.doctor.report import TIMEOUT, run

    return run(parsed.json, parsed.timeout or TIMEOUT)


if __name__ == "__main__":
    sys.exit(main())
