"""An argument parser whose errors are one line, without the usage, and exit status 2."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

WRONG_INPUT = 2


class OneLineParser(argparse.ArgumentParser):
    """``argparse.ArgumentParser`` that takes no abbreviations and says one line when it refuses."""

    def __init__(self, prog: str, description: str, **others: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **others)

    def error(self, message: str) -> NoReturn:
        """Say ``message`` on one line and leave."""
        refuse(self.prog, message)


def refuse(prog: str, message: object) -> NoReturn:
    """One line to stderr, then exit status 2."""
    print(f"{prog}: error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(WRONG_INPUT)


def positive(text: str) -> int:
    """A whole number from 1 up.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, but it is {text!r}")
    return int(text)


def not_negative(text: str) -> int:
    """A whole number from 0 up.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, but it is {text!r}")
    return int(text)
