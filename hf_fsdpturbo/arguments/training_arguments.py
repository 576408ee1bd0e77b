"""``FSDPTurboTrainingArguments``: our fields on plain ``transformers.TrainingArguments``."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import TrainingArguments

from hf_fsdpturbo.arguments.turbo_arguments import FSDPTurboArguments


@dataclass
class FSDPTurboTrainingArguments(FSDPTurboArguments, TrainingArguments):
    """``transformers.TrainingArguments`` with the fields of :class:`FSDPTurboArguments`."""
