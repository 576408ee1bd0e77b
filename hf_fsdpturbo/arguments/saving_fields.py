"""``SavingFields``: the fields of the arguments that say what is saved and how it is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from hf_fsdpturbo.arguments.defaults import UnsetInt


@dataclass
class SavingFields:
    """Part of ``FSDPTurboArguments``; see ``docs/checkpoints.md`` and ``docs/quantised.md``."""

    checkpoint_format: str | None = field(
        default=None, metadata={"help": "What a checkpoint-N holds: dcp, hub or both (docs/checkpoints.md)."}
    )
    verify_checkpoint: bool = field(
        default=cast(bool, UnsetInt(1)), metadata={"help": "Compare what is read of checkpoint-N with its checksums."}
    )
    save_quantized: bool = field(
        default=cast(bool, UnsetInt(0)),
        metadata={"help": "LoRA on a packed release: save_model copies the release's files too (docs/quantised.md)."},
    )
