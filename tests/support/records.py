"""What a run of the tests is told: `Run`, plain data that travels between processes, as what it leaves behind does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_fsdpturbo.verify.recording import Batch, Record

__all__ = ["DEFAULT_ARGS", "OWN_ARGS", "Batch", "Record", "Run"]

DEFAULT_ARGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.5,  # below the norms of tiny models, so that clipping acts
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "seed": 7,
}
OWN_ARGS = {"sft": {"max_length": 48}, "dpo": {"max_length": 48}, "reward": {"max_length": 48}}


@dataclass(frozen=True)
class Run:
    """One training run, described so that both sides can do it. Must be picklable.

    Attributes:
        model: path of a checkpoint.
        data: columns of the training set, or the folder of a saved ``datasets.Dataset``.
        args: training arguments over :data:`DEFAULT_ARGS` (no hf_fsdpturbo fields).
        turbo: hf_fsdpturbo fields (``ep_size``, ``dist_config``, ...), used on the sharded side only.
        trainer: "sft", "dpo", "reward", or one of ``reference_run.PLAIN`` (``transformers.Trainer``).
        as_object: give the trainer a model object instead of the path.
        prepare: importable ``f(model)`` called on that object before the trainer gets it (``as_object`` only).
        before_train: importable ``f(trainer) -> Any`` called before ``train()``; gives ``Record.extra["before"]``.
        after_train: the same after it, gives ``Record.extra["after"]``.
        model_kwargs: ``model_init_kwargs`` (TRL) or keywords of ``from_pretrained``.
        eval_data: columns of the evaluation set, or its folder.
        with_images: the checkpoint is a vision-language model's, and the trainer loads its processor itself.
        gradients: whether to record the gradients of every step (as the optimizer gets them, clipped).
        trainer_kwargs: further keywords of the trainer.
    """

    model: str
    data: dict[str, list[Any]] | str
    args: dict[str, Any] = field(default_factory=dict)
    turbo: dict[str, Any] = field(default_factory=dict)
    trainer: str = "sft"
    as_object: bool = False
    prepare: Callable[[nn.Module], None] | None = None
    before_train: Callable[[Any], Any] | None = None
    after_train: Callable[[Any], Any] | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    eval_data: dict[str, list[Any]] | str | None = None
    with_images: bool = False
    gradients: bool = True
    trainer_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def accumulation(self) -> int:
        """Micro-batches a rank and optimizer step."""
        return self.args.get("gradient_accumulation_steps", 1)
