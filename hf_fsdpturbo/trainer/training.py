"""One call of ``train()``: the output directory is claimed before it; however it ends, every rank leaves it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from hf_fsdpturbo.ranks import world_size
from hf_fsdpturbo.trainer import refusals, resumed_from
from hf_fsdpturbo.watcher import this_rank


@contextlib.contextmanager
def training(trainer: Any, resume_from_checkpoint: Any) -> Iterator[Any]:
    """Yields what to resume from; open while ``trainer`` trains. Collective.

    What exists now is kept out of garbage collection, which stops one rank while others wait in a collective.

    Raises:
        ValueError: no finished checkpoint, or settings that cannot work; on every rank.
    """
    if trainer.parallel_state is not None:
        refusals.refuse_callbacks(trainer.callback_handler.callbacks)
    trainer._saving.begin()
    ended = False
    try:
        checkpoint = resumed_from.checkpoint_of(trainer, resume_from_checkpoint)
        gc.collect()
        gc.freeze()
        with contextlib.nullcontext() if world_size() == 1 else this_rank().leaving_together():
            yield checkpoint
        ended = True
    finally:
        gc.unfreeze()
        trainer._finite.log.added()
        trainer._hang.end()
        trainer._saving.end(ended)
    trainer._set_up.peak.say_measured()
