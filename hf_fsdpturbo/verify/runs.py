"""The runs of a proof: each by our trainer on ranks and by TRL's own, as it is, in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_fsdpturbo.lora.adapter import config_of_files
from hf_fsdpturbo.verify.few_ranks import Layout
from hf_fsdpturbo.verify.made_data import LONGEST, ROWS, columns, loss_of
from hf_fsdpturbo.verify.recording import Batch, Record, recording, whole_parameters
from hf_fsdpturbo.verify.shrunk_config import SPECIAL
from hf_fsdpturbo.verify.small_model import SmallModel, small_tokenizer
from hf_fsdpturbo.verify.to_prove import Asked

PACKED = 64
TRAINERS = {"sft": "SFT", "dpo": "DPO", "reward": "Reward"}
"""What stands before ``Trainer`` and ``Config`` in TRL's names, by command."""
PAD = SPECIAL.index("pad_token_id")
CLIP = 0.25  # below the norms of small models, so that clipping acts
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": ROWS,
    "learning_rate": 1e-3,
    "max_grad_norm": CLIP,
    "lr_scheduler_type": "constant",
    "adam_epsilon": 1e-6,  # at 1e-8 an element whose gradient is rounding noise moves a whole step up or down
    "max_length": LONGEST + 8,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "seed": 7,
}
SAVED_AT = 2


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        steps: optimizer steps.
        args: TRL's arguments, on both sides.
        ranks_only: arguments of the ranks: what must not change a number.
        storage: dtype that weights are loaded in.
    """

    name: str
    steps: int
    args: dict[str, Any] = field(default_factory=dict)
    ranks_only: dict[str, Any] = field(default_factory=dict)
    storage: str = "float32"


def runs(asked: Asked) -> dict[str, Run]:
    """Those of a proof by name."""
    stored = {"save_strategy": "steps", "save_steps": SAVED_AT}
    again = {"gradient_checkpointing": True, "recompute": asked.recompute}
    found = [
        Run("train", SAVED_AT + 1, ranks_only=stored),
        Run("recompute", 1, ranks_only=again),
        Run("resume", SAVED_AT + 1),
    ]
    if asked.command == "sft":  # others take no packed rows
        found.append(Run("packing", 1, {"packing": True, "max_length": PACKED}))
    if asked.bf16:
        found.append(Run("bf16", 2, {"bf16": True}, storage=asked.storage))
    return {run.name: run for run in found}


def make_trainer(
    asked: Asked, small: SmallModel, run: Run, folder: str, layout: Layout | None, dp: int, cpu: bool
) -> Any:
    """A recording trainer: what a user would write.

    Args:
        layout: of our ranks; None is TRL's trainer in one process, for the batches of ``dp`` ranks.
    """
    import trl
    from datasets import Dataset

    import hf_fsdpturbo

    arguments = {**COMMON, **asked.training, **run.args, "max_steps": run.steps, "output_dir": folder, "use_cpu": cpu}
    if asked.layout.cp > 1:
        arguments["pad_to_multiple_of"] = 2 * asked.layout.cp
    own: dict[str, Any] = {}
    if layout is not None:
        own = {**layout.fields, **asked.turbo, **run.ranks_only, "ddp_timeout": max(10, int(asked.seconds) - 5)}
        own["dist_config"] = {**asked.dist, "efsdp_size": own.pop("efsdp_size")}
        if layout.world == 1:
            own = {k: v for k, v in own.items() if k in run.ranks_only or k in asked.turbo}
    else:
        arguments["gradient_accumulation_steps"] *= dp
    arguments["model_init_kwargs"] = {"dtype": run.storage, "attn_implementation": asked.attention}
    owner, prefix = (trl, "") if layout is None else (hf_fsdpturbo, "FSDPTurbo")
    name = f"{prefix}{TRAINERS[asked.command]}"
    micro_batches = arguments["gradient_accumulation_steps"] * (1 if layout is None else dp)
    rows = ROWS * micro_batches * (SAVED_AT + 4)  # as many in every run: then they share their first batches
    return recording(getattr(owner, f"{name}Trainer"))(
        model=small.folder,
        args=getattr(owner, f"{name}Config")(**{**arguments, **own}),
        train_dataset=Dataset.from_dict(columns(asked.command, rows)),
        processing_class=small_tokenizer(),
        peft_config=_adapter(asked),
    )


def _adapter(asked: Asked) -> Any:
    """``LoraConfig`` of the user's arguments, as TRL's scripts make it; None without."""
    if not asked.lora:
        return None
    from trl import ModelConfig, get_peft_config

    return get_peft_config(ModelConfig(**{**asked.lora, "lora_dropout": 0.0}))


def on_ranks(
    trainer: Any, *, resume: str | None = None, saved: str | None = None, after_save: Callable[[str], None]
) -> Record:
    """Rank function: train, save, and leave a record; whole tensors are rank 0's only."""
    from hf_fsdpturbo import ranks

    trainer.record.start_weights = whole_parameters(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    record: Record = trainer.finish_record()
    if saved is not None:
        trainer.save_model(saved)
        if ranks.rank() == 0:
            after_save(saved)
    if ranks.rank() > 0:
        return replace(record, gradients=[], weights={}, start_weights={})
    return as_peft(record)


def in_one_process(trainer: Any, batches: list[Batch] | None, *, moved: bool = False) -> Record:
    """TRL's trainer on the micro-batches that ranks saw.

    Args:
        batches: None for its own, where ranks saw none.
        moved: half an ulp away from the weights: how far agreeing runs may come apart.
    """
    if moved:
        from hf_fsdpturbo.verify.random_weights import move_by_half_an_ulp

        move_by_half_an_ulp(trainer.model)
    trainer.replay = batches
    trainer.record.start_weights = whole_parameters(trainer.model)
    trainer.train()
    record: Record = trainer.finish_record()
    record.extra["loss of the end"] = loss_of(trainer.model, record.batches[0])
    return record


def unpacked(batch: Batch) -> Batch:
    """The documents of a packed micro-batch, one a row: the same tokens and targets.

    Args:
        batch: ``input_ids``, ``labels``, ``position_ids``, each ``[rows, length]``; a document begins at position 0.
            Padding that rounds a row up is at positions 0: it stays, as routers see it.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids, labels = [], []
    for row, targets, places in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        ends = [*(places == 0).nonzero().flatten().tolist(), len(places)]
        for start, end in zip(ends, ends[1:], strict=False):
            ids.append(row[start:end])
            labels.append(targets[start:end])
    masks = [torch.ones_like(one) for one in ids]
    fill = {"input_ids": (ids, PAD), "labels": (labels, -100), "attention_mask": (masks, 0)}
    return {name: pad_sequence(rows, True, value) for name, (rows, value) in fill.items()}


def read_back(asked: Asked, small: SmallModel, saved: str, batch: Batch, cpu: bool) -> Record:
    """What plain Transformers (and plain PEFT) reads from the folder that ranks saved."""
    import torch

    model = read_plainly(small, small.folder if asked.lora else saved)
    if asked.lora:
        config_of_files(saved)  # imports peft, which only its owner may
        model = sys.modules["peft"].PeftModel.from_pretrained(model, saved)
    if not cpu:
        model = model.to(torch.accelerator.current_accelerator())
    record = Record(weights=whole_parameters(model))
    record.extra["loss of the end"] = loss_of(model, batch)
    return record


def read_plainly(small: SmallModel, folder: str) -> Any:
    """The model of a folder, by plain Transformers."""
    import torch
    import transformers

    return getattr(transformers, small.architecture).from_pretrained(folder, dtype=torch.float32)


def in_peft_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Expert-first LoRA factors (three dims) as PEFT's matrices."""
    from hf_fsdpturbo.sharding.expert_lora import FACTORS, to_peft

    result = {}
    for name, tensor in tensors.items():
        factor = next((f for f in FACTORS if f".{f}." in name), None)
        result[name] = to_peft(factor, tensor) if factor is not None and tensor.ndim == 3 else tensor
    return result


def as_peft(record: Record) -> Record:
    """The record with all tensors in PEFT's layout, which are those of a model without LoRA."""
    return replace(
        record,
        gradients=[in_peft_layout(step) for step in record.gradients],
        weights=in_peft_layout(record.weights),
        start_weights=in_peft_layout(record.start_weights),
    )


def checkpoint(folder: Path) -> str:
    """Where the run ``train`` left its checkpoint."""
    return str(folder / f"checkpoint-{SAVED_AT}")
