"""The peak that ``hf-fsdpturbo plan`` predicts for this run, said at its start, and the measured one at its end."""

from __future__ import annotations

from typing import Any

import torch

from hf_fsdpturbo.parallelize.trainer_family import trl_classes
from hf_fsdpturbo.plan.peak import GIB, highest
from hf_fsdpturbo.plan.planned_run import PlannedRun
from hf_fsdpturbo.plan.shape import shape_of_config
from hf_fsdpturbo.quantised.packed_weight import EXPONENTS, is_statistic
from hf_fsdpturbo.ranks import everyone, rank
from hf_fsdpturbo.telemetry.device_memory import memory_bytes
from hf_fsdpturbo.topology import Topology

_TASKS = {"SFTTrainer": "sft", "DPOTrainer": "dpo", "RewardTrainer": "reward"}
_STORED = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class PlannedPeak:
    """Prediction and measurement of one trainer. On CPU both are silent: a process's memory is mostly not the run's.

    Args:
        trainer_class: the user's.
        args: the training arguments.
        sizes: of the run.
    """

    def __init__(self, trainer_class: type, args: Any, sizes: Topology) -> None:
        self.args, self.sizes, self.device = args, sizes, torch.device(args.device)
        self.task = next((_TASKS[name] for name in trl_classes(trainer_class) if name in _TASKS), None)
        self.gib: float | None = None

    def line(self, model: Any, report: Any) -> str | None:
        """The prediction, on the rank that prints; None on CPU, or where plan knows no such run.

        Args:
            model: of the trainer.
            report: the run's ``ShardingReport``.
        """
        if self.device.type == "cpu" or report is None:
            return None
        try:
            run = self._run(model, report)
            if run is None:
                return None
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            shape = shape_of_config(base.config.get_text_config(), run.storage)
            peak = highest(shape, run)
        except (ValueError, AttributeError) as error:  # a model that plan cannot build is no fault of the run
            return f"[hf_fsdpturbo] plan has no peak for this run: {' '.join(str(error).split())[:160]}"
        self.gib = peak.gib()
        return (
            f"[hf_fsdpturbo] planned peak: {self.gib:.1f} GiB a rank ({peak.name}), for {run.batch} x {run.sequence} "
            "tokens a micro-step and even routing"
        )

    def say_measured(self) -> None:
        """After training: the largest of all ranks, beside the prediction. Collective, on accelerators."""
        if self.device.type == "cpu":
            return
        most = max(everyone(memory_bytes(self.device)[0])) / GIB
        if rank() == 0:
            planned = "" if self.gib is None else f", planned {self.gib:.1f} ({most / self.gib - 1:+.0%})"
            print(f"[hf_fsdpturbo] measured peak: {most:.1f} GiB on the fullest rank{planned}", flush=True)

    def _run(self, model: Any, report: Any) -> PlannedRun | None:
        args, sequence = self.args, getattr(self.args, "max_length", None)
        storage = _STORED.get(max(_bytes_by_dtype(model).items(), key=lambda entry: entry[1])[0])
        if self.task is None or not sequence or storage is None or not getattr(args, "bf16", False):
            return None  # a batch of any length, or a run that does not compute in bf16
        alone = self.sizes.world_size == 1
        dispatcher = ("fused" if report.fused_alone else "eager") if alone else report.dispatcher
        recomputes = getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False)
        lora_r, targets = _lora(model)
        return PlannedRun(
            self.sizes,
            sequence=-(-sequence // self.sizes.cp_size) * self.sizes.cp_size,
            batch=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            storage=storage,
            task=self.task,
            recompute=args.recompute if recomputes else "off",
            dispatcher="fused" if dispatcher == "auto" else dispatcher,
            fused_head=any(note.startswith("LM head: gradients") for note in report.notes),
            liger=any("rms_norm" in line for line in (report.kernels.lines if report.kernels else ())),
            offload=args.fsdpturbo_params.offload_params and not alone,
            lora_r=lora_r,
            lora_targets=targets,
            frozen=_frozen(model),
        )


def _bytes_by_dtype(model: Any) -> dict[torch.dtype, int]:
    found: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.dtype == torch.uint8:
            continue  # packed: the others say what it is in full
        found[parameter.dtype] = found.get(parameter.dtype, 0) + parameter.numel() * parameter.itemsize
    return found


def _frozen(model: Any) -> str:
    """How frozen weights are held, as plan has it."""
    ends = {name.rpartition("_")[2] for name, _ in model.named_parameters() if is_statistic(name)}
    return "mxfp4" if EXPONENTS in ends else "nf4" if ends else "full"


def _lora(model: Any) -> tuple[int, str]:
    """Rank and targets of the adapter, as plan has them; 0 without one."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return 0, "attention"
    names = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    routed = any(".experts." in name for name in names)
    dense = any(".experts." not in name for name in names)
    return next(iter(configs.values())).r, "all" if routed and dense else "experts" if routed else "attention"
