"""The folder that a run writes into: opened once, before a model is loaded, and what is wrong with it said by all."""

from __future__ import annotations

import os
from typing import Any

from hf_fsdpturbo.bounded import check_path, cut
from hf_fsdpturbo.ranks import raised_on_every_rank


def open_output_dir(config: Any) -> None:
    """Make ``output_dir`` where the trainer would, on the ranks that save. Collective.

    Raises:
        ValueError: it cannot be a folder, or nothing can be written there; on every rank.
    """
    path = config.output_dir
    with raised_on_every_rank("opening output_dir"):
        check_path("output_dir", "" if path is None else path)
        if config.should_save:
            try:
                os.makedirs(path, exist_ok=True)
                writable = os.access(path, os.W_OK | os.X_OK)
            except OSError as error:
                raise ValueError(
                    f"output_dir={cut(path)} cannot be made: {error.strerror}. Give another folder."
                ) from error
            if not writable:
                raise ValueError(f"output_dir={cut(path)} is not writable. Give another folder, or change its mode.")
