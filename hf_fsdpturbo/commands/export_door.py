"""``hf-fsdpturbo export CHECKPOINT OUT``: its words, checked before the export itself is imported."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

from hf_fsdpturbo.commands.one_line import OneLineParser, refuse

PROG = "hf-fsdpturbo export"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: Sequence[str]) -> int:
    """Write a Hub checkpoint from a sharded one; exit status 2 for wrong input, 1 where writing failed."""
    parser = OneLineParser(PROG, "A Hub checkpoint from a sharded one, on one machine, without a GPU.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a finished checkpoint-N directory")
    parser.add_argument("out", metavar="OUT", help="new directory for the Hub checkpoint")
    parser.add_argument("--max-file-size", type=_size, default="5GB", help="size at which a new file begins (5GB)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that lies in the checkpoint")
    options = parser.parse_args(list(argv))
    try:
        _check_folders(options.checkpoint, options.out)
        from hf_fsdpturbo.export import export_checkpoint  # late: it brings torch and transformers

        names = export_checkpoint(options.checkpoint, options.out, options.max_file_size, options.trust_remote_code)
    except ValueError as error:
        refuse(PROG, error)
    except OSError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {len(names)} weight file(s)")
    return 0


def _check_folders(checkpoint: str, out: str) -> None:
    if not os.path.isdir(checkpoint):
        raise ValueError(f"CHECKPOINT {checkpoint} is no directory. Give a finished checkpoint-N directory.")
    if os.path.exists(out) and not os.path.isdir(out):
        raise ValueError(f"OUT {out} is a file. Choose a new directory.")
    if os.path.isdir(out) and os.listdir(out):
        raise ValueError(f"OUT {out} is not empty. Choose a new directory.")


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(|KB|MB|GB)", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 500MB or a number of bytes")
    return int(match[1]) * _UNITS[match[2]]
