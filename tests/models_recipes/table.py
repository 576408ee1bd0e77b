"""Which recipes there could be: models, devices, kinds; and the settings of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HUB = {
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "glm-4.5-air": "zai-org/GLM-4.5-Air",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
}
"""Name that plan knows -> Hub id."""
QUANTISED = {"gpt-oss-20b": "MXFP4", "gpt-oss-120b": "MXFP4", "deepseek-v3": "FP8"}
"""Releases whose weights are quantised."""
DEVICES, MEMORIES, NODE = (8, 16), (80, 141), 8
HEADROOM = 0.92  # of a device's memory: plan is at most 4 % off what was measured, and routing is not even
MEASURED: dict[str, float] = {}
"""Recipe -> GiB that a run of it took. None of the whole models was run on so many devices so far."""


@dataclass(frozen=True)
class Kind:
    """One kind of training: the command, rows of a step over all devices, what is tried, and fixed settings."""

    command: str
    sequence: int
    rows: int
    tries: tuple[tuple[str, int], ...]  # (dtype of the weights, LoRA's rank), the first that fits
    settings: dict[str, Any]
    words: str


_COMMON = {
    "bf16": True, "lr_scheduler_type": "cosine", "warmup_steps": 20, "num_train_epochs": 1, "logging_steps": 10,
    "save_steps": 200, "save_total_limit": 2,
}  # fmt: skip
LORA = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
LORA_RATES = {"sft": 1.0e-4, "dpo": 5.0e-6}
DPO = {"learning_rate": 5.0e-7, "beta": 0.1}
FULL, SMALL = (("float32", 0), ("bfloat16", 0)), ("bfloat16", LORA["lora_r"])
KINDS = {
    "sft": Kind("sft", 4096, 64, FULL, {"learning_rate": 1.0e-5, **_COMMON}, "SFT of all weights"),
    "lora": Kind("sft", 4096, 64, (SMALL,), {**_COMMON}, "SFT"),
    "dpo": Kind("dpo", 2048, 64, (*FULL, SMALL), {**DPO, **_COMMON}, "DPO of all weights"),
}
