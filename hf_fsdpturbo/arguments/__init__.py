"""Configuration: fields, strict parsing, precedence between sources, refusals. Importing it needs no transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_fsdpturbo.arguments.command_line import check_command_line
from hf_fsdpturbo.arguments.params import (
    CHUNK_SIZES,
    DISPATCHER_NAMES,
    FLA_OPERATOR_NAMES,
    KERNEL_NAMES,
    FSDPTurboParams,
    InitParams,
    KernelParams,
)
from hf_fsdpturbo.arguments.start_up import bf16_storage_warning, describe_sources
from hf_fsdpturbo.arguments.stock import settings_beside
from hf_fsdpturbo.arguments.turbo_arguments import FSDPTurboArguments, sizes_for_world
from hf_fsdpturbo.arguments.unsupported import refuse_unsupported

if TYPE_CHECKING:
    from hf_fsdpturbo.arguments.training_arguments import FSDPTurboTrainingArguments

__all__ = [
    "CHUNK_SIZES",
    "DISPATCHER_NAMES",
    "FLA_OPERATOR_NAMES",
    "KERNEL_NAMES",
    "FSDPTurboArguments",
    "FSDPTurboParams",
    "FSDPTurboTrainingArguments",
    "InitParams",
    "KernelParams",
    "bf16_storage_warning",
    "check_command_line",
    "describe_sources",
    "refuse_unsupported",
    "settings_beside",
    "sizes_for_world",
]


def __getattr__(name: str) -> Any:
    if name == "FSDPTurboTrainingArguments":
        from hf_fsdpturbo.arguments.training_arguments import FSDPTurboTrainingArguments

        return FSDPTurboTrainingArguments
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
