"""A recipe's file as plan reads it: the run, and the memory of its devices, by the recipe's own settings."""

from __future__ import annotations

import re
from typing import Any

from hf_fsdpturbo.bounded import parse_yaml, read_text
from hf_fsdpturbo.plan.planned_run import PlannedRun
from hf_fsdpturbo.shipped import model_recipes
from hf_fsdpturbo.topology import Topology
from tests.models_recipes.table import NODE


def read(recipe: str) -> dict[str, Any]:
    """The settings of a shipped recipe."""
    path = str(model_recipes()[recipe])
    return parse_yaml(read_text(path), path)


def devices_and_memory(recipe: str) -> tuple[int, int]:
    """``(16, 80)`` of ``qwen3-30b-a3b/sft_16x80``."""
    devices, memory = re.fullmatch(r".*_(\d+)x(\d+)", recipe).groups()  # type: ignore[union-attr]
    return int(devices), int(memory)


def run_of(recipe: str, is_plain: bool) -> PlannedRun:
    """What plan is asked of a recipe; its dispatcher is ``auto``, which is ``fused`` for plain SwiGLU experts."""
    found = read(recipe)
    devices, _ = devices_and_memory(recipe)
    task = "dpo" if "/dpo_" in recipe else "sft"
    sizes = Topology.resolve(
        devices, ep_size=found["ep_size"], efsdp_size=found["dist_config"]["efsdp_size"], ranks_per_node=NODE
    )
    return PlannedRun(
        sizes,
        sequence=found["max_length"],
        batch=found["per_device_train_batch_size"],
        accumulation=found["gradient_accumulation_steps"],
        storage=found["dtype"],
        task=task,
        recompute=found["recompute"] if found["activation_checkpointing"] else "off",
        dispatcher="fused" if is_plain else "eager",
        fused_head=task == "sft",
        lora_r=found.get("lora_r", 0),
    )
