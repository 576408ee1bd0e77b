"""Saving settings that cannot work together, refused before training."""

from __future__ import annotations

from typing import Any

from hf_fsdpturbo.trainer.refusals import is_transformers_model


def check_settings(trainer: Any) -> None:
    """Refuse saving settings that cannot work together.

    Raises:
        ValueError: naming field, value, rule, fix; on every rank.
    """
    trainer._frozen_base.check()
    if trainer._saving.each_node and trainer._saving.format == "hub":
        raise ValueError(
            "save_on_each_node=True with checkpoint_format='hub': Hub files are written whole, on one disk, and every "
            "node would have to read them. Use dcp or both, or a file system that all nodes share."
        )
    if trainer._saving.each_node and trainer.async_save:
        raise ValueError("async_save=True with save_on_each_node=True is not supported: leave one of them out.")
    kept, model = trainer._saving.format, trainer.model
    if kept != "hub" and trainer.parallel_state is None and not is_transformers_model(model):
        raise ValueError(
            f"checkpoint_format={kept!r} needs a Transformers model, but model is a {type(model).__name__}. Leave it "
            "out."
        )
    if trainer.async_save and trainer._saving.as_plain:
        raise ValueError(
            "async_save=True acts on shards, and one process writes plain Trainer's files. Set checkpoint_format to "
            "'dcp'."
        )
    if trainer.async_save and trainer.args.push_to_hub:
        raise ValueError("async_save=True with push_to_hub=True is not supported: leave one of them out.")
