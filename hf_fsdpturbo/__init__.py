"""Expert parallelism for the Hugging Face Trainer: public names, each imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC: dict[str, str] = {
    "FSDPTurboArguments": "arguments",
    "FSDPTurboParams": "arguments",
    "FSDPTurboTrainingArguments": "arguments",
    "FSDPTurboEPModelSpec": "model_spec",
    "FSDPTurboParallelState": "parallel_state",
    "get_fsdpturbo_parallel_state": "parallel_state",
    "clip_grad_norm_": "grad_norm",
    "enable_fused_experts": "parallelize.fused_experts",
    "FSDPTurboTrainer": "trainer.mixin",
    "FSDPTurboTrainerMixin": "trainer.mixin",
    "FSDPTurboDPOConfig": "trl",
    "FSDPTurboDPOTrainer": "trl",
    "FSDPTurboRewardConfig": "trl",
    "FSDPTurboRewardTrainer": "trl",
    "FSDPTurboSFTConfig": "trl",
    "FSDPTurboSFTTrainer": "trl",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from hf_fsdpturbo.arguments import FSDPTurboArguments as FSDPTurboArguments
    from hf_fsdpturbo.arguments import FSDPTurboParams as FSDPTurboParams
    from hf_fsdpturbo.arguments import FSDPTurboTrainingArguments as FSDPTurboTrainingArguments
    from hf_fsdpturbo.grad_norm import clip_grad_norm_ as clip_grad_norm_
    from hf_fsdpturbo.model_spec import FSDPTurboEPModelSpec as FSDPTurboEPModelSpec
    from hf_fsdpturbo.parallel_state import FSDPTurboParallelState as FSDPTurboParallelState
    from hf_fsdpturbo.parallel_state import get_fsdpturbo_parallel_state as get_fsdpturbo_parallel_state
    from hf_fsdpturbo.parallelize.fused_experts import enable_fused_experts as enable_fused_experts
    from hf_fsdpturbo.trainer.mixin import FSDPTurboTrainer as FSDPTurboTrainer
    from hf_fsdpturbo.trainer.mixin import FSDPTurboTrainerMixin as FSDPTurboTrainerMixin
    from hf_fsdpturbo.trl import FSDPTurboDPOConfig as FSDPTurboDPOConfig
    from hf_fsdpturbo.trl import FSDPTurboDPOTrainer as FSDPTurboDPOTrainer
    from hf_fsdpturbo.trl import FSDPTurboRewardConfig as FSDPTurboRewardConfig
    from hf_fsdpturbo.trl import FSDPTurboRewardTrainer as FSDPTurboRewardTrainer
    from hf_fsdpturbo.trl import FSDPTurboSFTConfig as FSDPTurboSFTConfig
    from hf_fsdpturbo.trl import FSDPTurboSFTTrainer as FSDPTurboSFTTrainer


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"hf_fsdpturbo.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
