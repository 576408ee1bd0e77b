"""What a run is told and what it leaves behind: `Run` and `Record`, plain data that travels between processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

Batch = dict[str, Any]

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


@dataclass
class Record:
    """What a run did. Tensors are whole (gathered), on CPU, by parameter name; only rank 0 of a sharded run has them.

    ``load`` is what the experts of each layer were given in each step: on the sharded side as rank 0 has written it,
    on the other as the routers chose (``hand_counts.py``); ``entropies`` likewise. ``digest`` is a number for each
    final weight as this rank sees it: replicas that drifted apart differ in it.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    start_weights: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    log_history: list[dict[str, Any]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    trainable: list[str] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)
    with_optimizer_state: list[str] = field(default_factory=list)
    digest: dict[str, float] = field(default_factory=dict)
    load: list[list[Tensor]] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
