"""A batch that one rank cannot read: the others, which wait for it in a collective, end and say why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hf_fsdpturbo.ranks import FAILURES, rank, world_size
from hf_fsdpturbo.watcher import this_rank


@contextlib.contextmanager
def said_on_every_rank(what: str) -> Iterator[None]:
    """Run a block in which a rank may fail alone. Costs nothing where none does.

    Raises:
        ValueError: in place of a failure here, which the other ranks have printed by then.
    """
    if world_size() == 1:
        yield
        return
    watcher = this_rank()  # started here, to be there when another rank fails
    try:
        yield
    except FAILURES as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        message = f"{what} failed on rank {rank()}: {reason}"
        watcher.give_up(message)
        raise ValueError(message) from error
