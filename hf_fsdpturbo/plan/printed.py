"""What ``plan`` prints: a layout in GiB and MiB, a ranking, the accelerate YAML, JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_fsdpturbo.plan.exchanged import BETWEEN, INSIDE, even_at, sent
from hf_fsdpturbo.plan.held import held, host_bytes
from hf_fsdpturbo.plan.peak import GIB, KINDS, highest, moments
from hf_fsdpturbo.plan.planned_run import Asked, PlannedRun
from hf_fsdpturbo.plan.search import FREE, Candidate, fits
from hf_fsdpturbo.plan.shape import ModelShape

_SHOWN = 12  # layouts of a ranking
OPTIM = {"adamw_8bit": "adamw_torch_8bit", "adamw_4bit": "adamw_torch_4bit"}
"""Transformers' names of torchao's optimizers."""


def layout_of(run: PlannedRun) -> dict[str, int]:
    """Sizes that make the layout."""
    sizes = run.topology.to_dict()
    names = ("world_size", "ep_size", "efsdp_size", "edp_size", "cp_size", "mp_replicate_size", "mp_shard_size")
    return {name: sizes[name] for name in names}


def as_dict(shape: ModelShape, run: PlannedRun, memory: float) -> dict[str, Any]:
    """All of a plan as plain numbers, GiB a rank."""
    peak, away = highest(shape, run), sent(shape, run)
    return {
        "model": shape.name,
        "parameters": {"dense": shape.dense_numel, "experts": shape.expert_numel},
        "layout": layout_of(run),
        "recompute": run.recompute,
        "optimizer": run.optimizer,
        "offload": run.offload,
        "frozen": run.frozen,
        "peak_gib": round(peak.gib(), 2),
        "peak_at": peak.name,
        "gib": {kind: round(peak.gib(kind), 2) for kind in KINDS},
        "fits": fits(peak, memory),
        "host_gib": round(host_bytes(shape, run) / GIB, 2),
        "sent_gib": {"inside": round(away.inside / GIB, 2), "between": round(away.between / GIB, 2)},
        "even_at_tokens": even_at(shape, run),
        "notes": notes_of(shape, run),
    }


def print_json(value: Any) -> None:
    """To standard output."""
    print(json.dumps(value, indent=1))


def notes_of(shape: ModelShape, run: PlannedRun) -> list[str]:
    """What a reader must know of these numbers."""
    notes = list(shape.notes)
    if run.frozen != "full":
        whole, packed = (held(shape, replace(run, frozen=way)).weights / GIB for way in ("full", run.frozen))
        what = "experts stay in MXFP4" if run.frozen == "mxfp4" else "linear layers and experts are in NF4"
        notes.append(f"{what} while adapters train: {packed:.2f} GiB of weights a rank instead of {whole:.2f}")
    if shape.packed is not None and run.frozen != "mxfp4":
        notes.append(shape.packed)
    sizes = run.topology
    even = even_at(shape, run)
    if even is not None:
        nodes = sizes.ep_size // max(1, sizes.ranks_per_node // sizes.cp_size)
        pays = run.tokens < even
        notes.append(
            f"EP over {nodes} nodes {'pays' if pays else 'does not pay'}: it sends fewer bytes between nodes than EP "
            f"inside a node with EFSDP over nodes up to {even:,.0f} tokens a device and micro-step; here are "
            f"{run.tokens:,}"
        )
    if any(unit.experts and not experts.is_plain for unit in shape.layers for experts in unit.experts):
        notes.append("experts are not a plain SwiGLU: their own forward runs, counted coarsely")
    if any(unit.is_linear_attention for unit in shape.layers):
        notes.append("linear attention is counted coarsely, as FLA keeps it; PyTorch's rule keeps 2 to 3 times that")
    if any(name.endswith(".sinks") for name, _ in shape.model.named_parameters()):  # sdpa has none
        notes.append("attention is counted as flash: eager attention keeps length x heads numbers a token besides")
    if run.optimizer != "adamw" and run.topology.world_size > 1:
        notes.append(f"optim {OPTIM[run.optimizer]} is refused in sharded runs by this release: a look ahead")
    if run.offload:
        kept = held(shape, run)
        notes.append(
            f"offload: {(kept.always + kept.gradients) / GIB:.1f} GiB a rank lie on the host, where the optimizer "
            "steps too; what goes over PCIe is not counted"
        )
    if run.task == "dpo":
        notes.append("DPO's whole logits are counted as three of them; not measured")
    return notes


def in_words(shape: ModelShape, run: PlannedRun, memory: float) -> list[str]:
    """A layout: sizes, GiB by kind at the highest moment, and what other moments take."""
    steps = moments(shape, run)
    peak = max(steps, key=lambda moment: moment.total)
    away, sizes = sent(shape, run), layout_of(run)
    verdict = "fits" if fits(peak, memory) else "DOES NOT FIT"
    host = host_bytes(shape, run) / GIB
    lines = [
        f"{shape.name}: {shape.numel / 1e9:.1f} B parameters ({shape.expert_numel / 1e9:.1f} B in experts, "
        f"{shape.dense_numel / 1e9:.2f} B dense), {len(shape.layers)} layers, {shape.num_experts} experts",
        ", ".join(f"{name}={size}" for name, size in sizes.items()),
        f"{run.task}, {run.batch} x {run.sequence} tokens, weights in {run.storage}, recompute {run.recompute}, "
        f"dispatcher {run.dispatcher}, {run.optimizer}{', offloaded' if run.offload else ''}"
        f"{f', LoRA r={run.lora_r} on {run.lora_targets}, frozen {run.frozen}' if run.lora_r else ''}",
        "",
        f"GiB a rank at the highest moment ({peak.name}):",
        *(f"  {kind:18}{peak.gib(kind):8.2f}" for kind in KINDS if peak.kinds[kind]),
        f"  {'peak':18}{peak.gib():8.2f}   {verdict} in {memory:g} GiB ({FREE:g} left free for CUDA, NCCL, fragments)",
        "other moments: " + ", ".join(f"{name} {total / GIB:.2f}" for name, total in _outline(steps)),
        f"host while loading, at most: {host:.2f} GiB a rank, {host * run.topology.ranks_per_node:.1f} a node "
        f"(init_on_rank0: {sum(p.numel * p.stored for p in _all_parts(shape)) / GIB:.0f} on rank 0)",
        f"sent a rank and micro-step: {away.inside / GIB:.2f} GiB inside the node, {away.between / GIB:.2f} between "
        "nodes",
    ]
    return lines + [f"note: {note}" for note in notes_of(shape, run)]


def _all_parts(shape: ModelShape) -> list[Any]:
    parts = [part for unit in shape.units for part in (*unit.sharded, *unit.whole)]
    return parts + [p for unit in shape.layers for e in unit.experts for p in (*e.stacked, *e.shared)]


def _outline(steps: Sequence[Any]) -> list[tuple[str, int]]:
    """The highest of each sort of moment: the head, the layers, the root, the optimizer."""
    found: dict[str, int] = {}
    for step in steps:
        name = "layers" if step.name.startswith("layer") else step.name
        found[name] = max(found.get(name, 0), step.total)
    return list(found.items())


def ranking(found: Sequence[Candidate], memory: float) -> list[str]:
    """The layouts that fit, best first, as a table."""
    lines = [
        f"{len(found)} layouts fit in {memory:g} GiB; ranked by seconds of what is sent ({INSIDE / 1e9:.0f} "
        f"GB/s inside a node, {BETWEEN / 1e9:.0f} between) and run again, nothing hidden; then by memory",
        "  ep efsdp  edp  cp  recompute  peak GiB  GiB inside  between  seconds",
    ]
    for candidate in found[:_SHOWN]:
        sizes = candidate.run.topology
        lines.append(
            f"{sizes.ep_size:4} {sizes.efsdp_size:5} {sizes.edp_size:4} {sizes.cp_size:3} "
            f"{candidate.run.recompute:>10} {candidate.peak.gib():9.2f} {candidate.sent.inside / GIB:11.2f} "
            f"{candidate.sent.between / GIB:8.2f} {candidate.seconds:8.3f}"
        )
    return lines + ([f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])


def nothing_fits(shape: ModelShape, asked: Asked) -> list[str]:
    """What to try where no layout fits."""
    tries = ["more devices", "a smaller --batch or --sequence", "--lora_r 16"]
    if not asked.settings.get("offload"):
        tries.append("--offload")
    if asked.settings["storage"] == "float32":
        tries.insert(0, "--storage bfloat16")
    if asked.sizes["cp_size"] == 1:
        tries.append("--cp_size 2")
    return [
        f"{shape.name}: no layout of {asked.devices} devices fits in {asked.memory:g} GiB. Try {', '.join(tries)}."
    ]


def yaml_of(shape: ModelShape, run: PlannedRun) -> str:
    """The accelerate config of a layout, in the form of the shipped ones; what it cannot carry is in its comments."""
    sizes = run.topology
    arguments = [f"--per_device_train_batch_size {run.batch}", f"--max_length {run.sequence}"]
    if run.accumulation > 1:
        arguments.append(f"--gradient_accumulation_steps {run.accumulation}")
    if run.recompute != "off":
        arguments.append("--activation_checkpointing true")
    if run.optimizer != "adamw":
        arguments.append(f"--optim {OPTIM[run.optimizer]}")
    peak = highest(shape, run)
    fields: list[tuple[str, Any]] = [
        ("cp_size", sizes.cp_size if sizes.cp_size > 1 else None),
        ("mp_replicate_size", sizes.mp_replicate_size if sizes.mp_replicate_size > 1 else None),
        ("ep_size", sizes.ep_size),
        ("ep_dispatcher", run.dispatcher),
        ("recompute", run.recompute if run.recompute != "off" else None),
    ]
    return "\n".join(
        [
            f"# {shape.name} on {sizes.world_size} devices: {peak.gib():.1f} GiB a rank, by hf-fsdpturbo plan.",
            f"# With {' '.join(arguments)}",
            "compute_environment: LOCAL_MACHINE",
            "distributed_type: MULTI_GPU",
            f"num_machines: {sizes.world_size // sizes.ranks_per_node}",
            "machine_rank: 0",
            f"num_processes: {sizes.world_size}",
            "mixed_precision: bf16",
            "use_cpu: false",
            "main_training_function: main",
            "fsdp_config:",
            *(f"  fsdp_turbo_{name}: {value}" for name, value in fields if value is not None),
            "  fsdp_turbo_dist_config:",
            f"    param_storage_dtype: {run.storage}",
            f"    efsdp_size: {sizes.efsdp_size}",
            *(["    offload_params: true"] if run.offload else []),
        ]
    )
