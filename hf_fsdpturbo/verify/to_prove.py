"""What is to be proven: the model, the layout, and those of the user's arguments that change what is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_fsdpturbo.verify.few_ranks import Layout

TRAINING = (
    "optim",
    "adam_beta1",
    "adam_beta2",
    "weight_decay",
    "gradient_accumulation_steps",
    "average_tokens_across_devices",
)
"""Arguments of TRL's configs that are carried into every run, on both sides."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "sft": ("loss_type", "label_smoothing_factor", "packing_strategy"),
    "dpo": (
        "loss_type",
        "loss_weights",
        "beta",
        "label_smoothing",
        "ld_alpha",
        "f_divergence_type",
        "f_alpha_divergence_coef",
        "use_weighting",
        "discopop_tau",
    ),
    "reward": ("center_rewards_coefficient",),
}
"""Commands that can be proven, and what is carried of their own arguments."""
REFERENCE = ("precompute_ref_log_probs", "sync_ref_model")
"""Of DPO: the first needs a data set in files, and what the second moves is not in a checkpoint."""
QUANTISED = ("load_in_4bit", "load_in_8bit")
TURBO = (
    "kernel_config",
    "init_config",
    "fused_linear_cross_entropy",
    "optim_implementation",
    "checkpoint_format",
    "check_loading",
    "fsdpturbo_metrics",
)
"""Fields of ours that are carried to the ranks; sizes are the layout's, ``recompute`` has a run of its own."""
DIST = (
    "reshard_after_forward",
    "offload_params",
    "pin_memory",
    "ep_dispatcher",
    "fsdp_ignored_modules",
    "hook_modules",
    "fsdp_implementation",
    "ep_backend",
)
"""Keys of ``dist_config`` that are carried: sizes are the layout's, the storage dtype belongs to the bf16 run."""
LORA = (
    "use_peft",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "lora_task_type",
    "use_rslora",
    "use_dora",
)
"""Fields of TRL's ModelConfig; dropout is 0, since it draws on every rank for itself."""
MOST_ACCUMULATION = 2


@dataclass(frozen=True)
class Asked:
    """One line of ``verify``, with the user's files read.

    Attributes:
        model: as it was typed. values: its ``config.json``.
        command: of :data:`COMMANDS`.
        users: the layout of the user's run. layout: the one to run here.
        training, turbo, dist, lora: what is carried, by the names above.
        attention: ``attn_implementation``, None for Transformers' choice.
        bf16: whether the user computes in bf16. storage: dtype of the weights then.
        recompute: ``full`` or ``selective``.
        fault: what ``--inject`` breaks.
        seconds: limit of one launch.
        device: ``auto``, ``cpu`` or ``accelerator``. fresh: new interpreters on CPU too.
        folder: where models, logs and records stay; None for nowhere.
        notes: what is not carried, and why.
    """

    model: str
    values: dict[str, Any]
    users: Layout
    layout: Layout
    command: str = "sft"
    training: dict[str, Any] = field(default_factory=dict)
    turbo: dict[str, Any] = field(default_factory=dict)
    dist: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    attention: str | None = None
    bf16: bool = True
    storage: str = "float32"
    recompute: str = "full"
    fault: str | None = None
    seconds: float = 150.0
    device: str = "auto"
    fresh: bool = False
    folder: Path | None = None
    notes: tuple[str, ...] = ()


def carried(given: Mapping[str, Any], *, cpu: bool, command: str = "sft") -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of :class:`Asked` from the user's arguments, and notes.

    Args:
        given: what the user gave, by argument; ``dist_config`` is a mapping here.
        cpu: ranks will run on CPU: what only an accelerator has is replaced or left out, and a note says so.
        command: whose arguments they are.

    Raises:
        ValueError: what they ask for cannot be proven.
    """
    for name in QUANTISED:
        if given.get(name):
            raise ValueError(
                f"{name}: verify proves no quantised base: plain TRL trains no quantised experts to compare with. "
                "Leave it out, to prove your layout with the weights in full."
            )
    notes = [f"{name} is not carried" for name in REFERENCE if given.get(name)]
    dist = {name: value for name, value in (given.get("dist_config") or {}).items() if name in DIST}
    if given.get("ep_dispatcher") is not None:
        dist["ep_dispatcher"] = given["ep_dispatcher"]
    turbo = {name: given[name] for name in TURBO if given.get(name) is not None}
    training = {name: given[name] for name in (*TRAINING, *COMMANDS[command]) if given.get(name) is not None}
    accumulation = training.get("gradient_accumulation_steps", MOST_ACCUMULATION)
    training["gradient_accumulation_steps"] = min(int(accumulation), MOST_ACCUMULATION)
    if given.get("router_aux_loss_coef") == 0:  # any other size of it is the small model's
        training["router_aux_loss_coef"] = 0.0
    attention = given.get("attn_implementation")
    if cpu:
        notes += _for_cpu(dist, turbo)
        if attention is not None and "flash" in str(attention):
            notes.append(f"attn_implementation {attention} needs an accelerator: sdpa here")
            attention = "sdpa"
    lora = {name: given[name] for name in LORA if given.get(name) is not None} if given.get("use_peft") else {}
    if lora and given.get("lora_dropout"):
        notes.append("lora_dropout is 0 here: each rank draws for itself")
    storage = (given.get("dist_config") or {}).get("param_storage_dtype", "auto")
    if storage == "auto":
        storage = str(given.get("dtype") or "float32")
    fields = {
        "training": training, "turbo": turbo, "dist": dist, "lora": lora, "attention": attention,
        "bf16": given.get("bf16") is not False, "storage": storage if storage == "bfloat16" else "float32",
        "recompute": given.get("recompute") or "full",
    }  # fmt: skip
    return fields, tuple(notes)


def _for_cpu(dist: dict[str, Any], turbo: dict[str, Any]) -> list[str]:
    """Replace what has no CPU form; in place, with notes."""
    notes = []
    if dist.get("ep_dispatcher") == "mc2":
        notes.append("dispatcher mc2 needs an Ascend A3: fused here")
        dist["ep_dispatcher"] = "fused"
    if dist.get("offload_params"):
        dist["pin_memory"] = False
    kernels = turbo.get("kernel_config")
    if isinstance(kernels, Mapping) and "liger" in str(kernels.get("name", "")):
        notes.append("kernel_config liger needs an accelerator: left out here")
        del turbo["kernel_config"]
    if dist.get("ep_backend") == "fsdp_turbo":
        notes.append("ep_backend fsdp_turbo needs the upstream library: torch here")
        for name in ("ep_backend", "hook_modules", "fsdp_implementation"):
            dist.pop(name, None)
    return notes
