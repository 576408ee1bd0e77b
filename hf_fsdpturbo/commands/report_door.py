"""``hf-fsdpturbo report RUN``: the picture of expert load of a run that has ended, or goes on, drawn again."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hf_fsdpturbo.one_line import OneLineParser, refuse
from hf_fsdpturbo.telemetry.load_picture import draw_load
from hf_fsdpturbo.telemetry.load_record import FILE, read_load, summary

PROG = "hf-fsdpturbo report"


def main(argv: Sequence[str]) -> int:
    """Read ``RUN/expert_load.npz``, draw ``RUN/expert_load.png``, print what the last window was like."""
    parser = OneLineParser(PROG, "Draw the expert load of a run: RUN/expert_load.png from RUN/expert_load.npz.")
    parser.add_argument("run", metavar="RUN", help="a run's output_dir")
    parser.add_argument("--out", metavar="FOLDER", help="where the picture goes (default: RUN)")
    options = parser.parse_args(list(argv))
    try:
        record = read_load(options.run)
        path = draw_load(record, options.run if options.out is None else options.out)
    except (FileNotFoundError, NotADirectoryError):
        there = os.path.isdir(options.run)
        what = f"{options.run!r} has no {FILE}" if there else f"there is no folder {options.run!r} with {FILE}"
        refuse(PROG, f"argument RUN: {what}. Give the output_dir of a sharded run with experts.")
    except (ValueError, ImportError, OSError) as error:
        refuse(PROG, error)
    print(summary(record))
    print(path)
    return 0
