"""One error a failure: the launcher's report holds the traceback once, and each rank says one line."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from hf_fsdpturbo import launch_config
from hf_fsdpturbo.ranks import FAILURES

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LATER = 3600
"""Seconds by which the ranks that only follow are dated later: torch reports the earliest as the root cause."""


def run_recipe(main: Callable[[], Any]) -> None:
    """``main()``, as the last thing a recipe does.

    Under ``torchrun`` and ``accelerate launch`` of several processes the first rank of a node to fail leaves its
    traceback to the launcher, which prints it as the root cause; the others leave a line. Elsewhere Python prints it.

    Raises:
        SystemExit: status 1, after a failure under such a launcher.
    """
    path = launch_config.variable(ERROR_FILE)
    if path is None:
        main()
        return
    try:
        _recorded(main, path)
    except FAILURES as error:  # written down already, and the last thing this process says
        print(f"[rank {launch_config.rank()}] {_line(error)}", file=sys.stderr, flush=True)
        sys.exit(1)


def _recorded(main: Callable[[], Any], path: str) -> None:
    def first_of_the_node() -> None:
        try:
            main()
        except FAILURES as error:
            if not _is_first(path):
                raise _Follows(_line(error)) from error
            raise

    try:
        record(first_of_the_node)()
    except _Follows as error:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": f"as the first rank: {error}", "timestamp": str(int(time.time()) + LATER)}, file)
        raise


class _Follows(Exception):
    """A failure of a rank that is not the first of its node to fail."""


def _is_first(path: str) -> bool:
    """Whether no other rank of this node has failed yet: error files lie in one folder a rank, side by side."""
    try:
        os.close(os.open(os.path.join(os.path.dirname(os.path.dirname(path)), "failed_first"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _line(error: BaseException) -> str:
    text = (str(error).strip() or repr(error)).splitlines()[0]
    return text if isinstance(error, _Follows) else f"{type(error).__name__}: {text}"
