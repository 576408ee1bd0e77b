"""``hf-fsdpturbo doctor [--json] [--timeout SECONDS]``: its words."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from hf_fsdpturbo.doctor.report import TIMEOUT, run
from hf_fsdpturbo.one_line import OneLineParser


def main(argv: Sequence[str]) -> int:
    """Examine this machine; exit status 1 where a check failed."""
    parser = OneLineParser("hf-fsdpturbo doctor", "Is this machine ready? Versions, devices, operators, an exchange.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--timeout", type=_seconds, default=TIMEOUT, help="seconds a single check may take")
    options = parser.parse_args(list(argv))
    return run(options.json, options.timeout)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, but it is {text!r}")
    return seconds
