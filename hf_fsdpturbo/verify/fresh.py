"""A process of a launch as a new interpreter: ``python -m hf_fsdpturbo.verify.fresh FILE``, a file of its parent.

What libraries read at import (``HF_HUB_OFFLINE``, visible devices) is set before anything is imported.
"""

from __future__ import annotations

import pickle
import sys
from typing import NoReturn


def main(file: str) -> NoReturn:
    """Be the process that ``file`` describes: how it begins, then its work, one pickle each (both our own)."""
    with open(file, "rb") as source:
        path, environment, folder, rank, seconds = pickle.load(source)
        sys.path[:] = path
        from hf_fsdpturbo.launch_config import begin_afresh

        begin_afresh(environment)
        from hf_fsdpturbo.verify.processes import be_child  # imports torch

        be_child(lambda: pickle.load(source)(), environment, folder, rank, seconds)


if __name__ == "__main__":
    main(sys.argv[1])
