"""The recipe of one row of the table: the best layout that fits by plan's search, as a YAML; and who fits where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hf_fsdpturbo.plan.planned_run import Asked
from hf_fsdpturbo.plan.search import Candidate, search
from hf_fsdpturbo.plan.shape import ModelShape, shape_of
from hf_fsdpturbo.shipped import RECIPES
from tests.models_recipes.table import (
    DEVICES,
    HEADROOM,
    HUB,
    KINDS,
    LORA,
    LORA_RATES,
    MEASURED,
    MEMORIES,
    NODE,
    QUANTISED,
    Kind,
)

FOLDER = Path(__file__).parents[2] / RECIPES / "models"


def settings_of_plan(shape: ModelShape, kind: Kind, devices: int, storage: str, lora_r: int) -> dict[str, Any]:
    """What plan is asked, beside sizes."""
    is_plain = all(experts.is_plain for unit in shape.layers for experts in unit.experts)
    return {
        "sequence": kind.sequence, "batch": 1, "accumulation": kind.rows // devices, "storage": storage,
        "task": kind.command, "recompute": None, "dispatcher": "fused" if is_plain else "eager", "liger": False,
        "optimizer": "adamw", "offload": False, "lora_r": lora_r, "lora_targets": "attention",
        "fused_head": kind.command == "sft",
    }  # fmt: skip


def best(shapes: dict[str, ModelShape], kind: Kind, name: str, devices: int, memory: int) -> Candidate | None:
    """The first of what is tried that fits, in its best layout."""
    sizes = {"ep_size": None, "efsdp_size": None, "cp_size": 1, "mp_replicate_size": 1, "ranks_per_node": NODE}
    for storage, lora_r in kind.tries:
        shape = shapes.setdefault(storage, shape_of(name, storage)) if storage not in shapes else shapes[storage]
        settings = settings_of_plan(shape, kind, devices, storage, lora_r)
        found = search(shape, Asked(name, devices, memory * HEADROOM, sizes, settings))
        if found:
            return found[0]
    return None


def attention_of(shape: ModelShape) -> list[str]:
    """Last names of attention's linears, what LoRA adapts."""
    names = {name for unit in shape.layers for name in unit.linears if "attn" in name or "attention" in name}
    return sorted({name.rpartition(".")[2] for name in names})


def text_of(shape: ModelShape, recipe: str, kind: Kind, name: str, chosen: Candidate) -> str:
    """The YAML of a recipe."""
    run, sizes = chosen.run, chosen.run.topology
    words = kind.words
    settings: dict[str, Any] = {"model_name_or_path": HUB[name], "dtype": run.storage}
    settings["output_dir"] = f"outputs/{recipe.replace('/', '_')}"
    settings |= {"max_length": run.sequence, "per_device_train_batch_size": run.batch}
    settings |= {"gradient_accumulation_steps": run.accumulation, **kind.settings}
    if run.lora_r:
        words = f"{kind.command.upper()} with LoRA on attention"
        settings |= {**LORA, "lora_target_modules": attention_of(shape), "learning_rate": LORA_RATES[kind.command]}
    settings |= {"ep_size": sizes.ep_size, "dist_config": {"efsdp_size": sizes.efsdp_size}}
    settings["activation_checkpointing"] = run.recompute != "off"
    if run.recompute != "off":
        settings["recompute"] = run.recompute
    figure = f"measured {MEASURED[recipe]}" if recipe in MEASURED else f"planned {chosen.peak.gib():.1f}"
    over = f", {sizes.world_size // NODE} nodes of {NODE}" if sizes.world_size > NODE else ""
    memory = recipe.rpartition("x")[2]
    lines = [f"# {HUB[name]}: {words} on {sizes.world_size} devices of {memory} GiB{over}; {figure} GiB a rank."]
    if name in QUANTISED:
        lines.append(f"# The release is {QUANTISED[name]}: {becomes(QUANTISED[name], run.lora_r)}.")
    if run.storage == "bfloat16" and not run.lora_r:
        lines.append("# Stored in bfloat16, since float32 does not fit: updates far below a weight's size are lost.")
    lines.append(f"# hf-fsdpturbo {kind.command} --config {recipe} --dataset_name ...")
    return "\n".join([*lines, yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=110)])


def becomes(method: str, lora_r: int) -> str:
    """What a run makes of a packed release, in words."""
    if method == "MXFP4" and lora_r:
        return "beside an adapter its experts stay packed, which takes less than is planned here"
    return "it is dequantised while it loads"


def write_all() -> str:
    """Write every recipe that fits; the table of ``docs/plan.md`` in Markdown."""
    for old in FOLDER.rglob("*.yaml"):
        old.unlink()
    columns = [(kind, devices, memory) for kind in KINDS for devices in DEVICES for memory in MEMORIES]
    rows = [f"| model | {' | '.join(f'{kind} {devices}x{memory}' for kind, devices, memory in columns)} |"]
    rows.append("|---" * (len(columns) + 1) + "|")
    for name in HUB:
        shapes: dict[str, ModelShape] = {}
        cells = []
        for kind, devices, memory in columns:
            chosen = best(shapes, KINDS[kind], name, devices, memory)
            recipe = f"{name}/{kind}_{devices}x{memory}"
            if chosen is not None:
                path = FOLDER / f"{recipe}.yaml"
                path.parent.mkdir(parents=True, exist_ok=True)
                text = text_of(shapes[chosen.run.storage], recipe, KINDS[kind], name, chosen)
                path.write_text(text, encoding="utf-8")
            cells.append("-" if chosen is None else _cell(kind, chosen))
            print(recipe, cells[-1], flush=True)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(kind: str, chosen: Candidate) -> str:
    mark = "*" if chosen.run.storage == "float32" else "L" if chosen.run.lora_r and kind != "lora" else ""
    return f"{chosen.peak.gib():.0f}{mark}"
