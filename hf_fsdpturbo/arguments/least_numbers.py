"""Numbers of TrainingArguments and TRL's configs below which a run trains nothing, or dies and names nobody."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hf_fsdpturbo.bounded import cut

LEAST: dict[str, int] = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "max_length",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "learning_rate",
            "weight_decay",
            "num_train_epochs",
            "warmup_steps",
            "dataloader_num_workers",
            "dataset_num_proc",
        ),
        0,
    ),
}
"""Field -> the least that has a meaning; -1 has one for others (``max_steps``, ``save_total_limit``)."""


def refuse_numbers(values: Mapping[str, Any]) -> None:
    """Raise ValueError for a number below its field's least, infinite or NaN; what is no number is left alone."""
    for name, least in LEAST.items():
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value) or value < least:
            raise ValueError(
                f"{name} must be a number of {least} or more, but it is {cut(value)}. Correct it, or leave it out."
            )
