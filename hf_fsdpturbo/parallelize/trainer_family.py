"""Which of TRL's trainers a class extends, and the loader that its family uses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_fsdpturbo.loading.files import WHERE

if TYPE_CHECKING:
    from hf_fsdpturbo.arguments import FSDPTurboArguments

ONLINE_TRAINERS = ("GRPOTrainer", "RLOOTrainer")
"""TRL's trainers that build models inside their own ``__init__`` and generate; refused until that is built."""


TASKS = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}
"""Ends of class names in a checkpoint's config -> the auto class that loads it."""


def trl_classes(trainer_class: type) -> dict[str, type]:
    """The classes of TRL that a trainer extends, by name, nearest first; none for other trainers."""
    return {cls.__name__: cls for cls in trainer_class.__mro__ if cls.__module__.startswith("trl.")}


def default_arguments(trainer_class: type) -> Any:
    """What a trainer that is given no ``args`` makes itself: the defaults of its family's class."""
    from transformers import TrainingArguments

    for name, cls in trl_classes(trainer_class).items():
        config = vars(sys.modules[cls.__module__]).get(name.replace("Trainer", "Config"))
        if name.endswith("Trainer") and config is not None:
            return config()
    return TrainingArguments()


def _auto_class(path: str, kwargs: dict[str, Any]) -> Any:
    """The auto class of the checkpoint's task; a causal LM where its config names no task of the table."""
    import transformers

    where = {name: kwargs[name] for name in WHERE if kwargs.get(name)}
    loaded = transformers.AutoConfig.from_pretrained(
        path, trust_remote_code=kwargs.get("trust_remote_code", False), **where
    )
    for architecture in loaded.architectures or ():
        for task, auto_class in TASKS.items():
            if architecture.endswith(task):
                return getattr(transformers, auto_class)
    return transformers.AutoModelForCausalLM


def refuse_online(trainer_class: type) -> None:
    """Refuse trainers that load a reference past us.

    Raises:
        ValueError: naming the trainer.
    """
    for name in trl_classes(trainer_class):
        if name in ONLINE_TRAINERS:
            raise ValueError(
                f"{name} is not supported: it loads a whole reference model on every rank and generates while it "
                "trains. Use SFT, DPO, KTO or reward training."
            )


def trusts_code(config: FSDPTurboArguments) -> bool:
    """Whether ``trust_remote_code`` was given, where :func:`model_loader` takes it from."""
    kwargs = getattr(config, "model_init_kwargs", None) or {}
    return bool(kwargs.get("trust_remote_code", getattr(config, "trust_remote_code", False)))


def model_loader(
    trainer_class: type, config: FSDPTurboArguments, defaults: dict[str, Any], path: str
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The ``from_pretrained`` that a trainer's family uses, and its keywords. TRL trainers take TRL's own.

    Args:
        defaults: keywords below ``model_init_kwargs``.
        path: of the checkpoint, whose own class says what head plain Trainer gets.

    Raises:
        ValueError: a keyword that places the model.
    """
    kwargs: dict[str, Any] = {**defaults, **(getattr(config, "model_init_kwargs", None) or {})}
    for name in ("device_map", "distributed_config", "tp_plan"):
        if kwargs.pop(name, None) is not None:
            raise ValueError(
                f"model_init_kwargs[{name!r}] is not supported: placement is decided by hf_fsdpturbo. Remove it."
            )
    trl = trl_classes(trainer_class)
    if not trl:
        return _auto_class(path, kwargs).from_pretrained, kwargs
    from trl.trainer.utils import create_model_from_path

    kwargs.setdefault("trust_remote_code", getattr(config, "trust_remote_code", False))
    if "RewardTrainer" in trl:
        from transformers import AutoModelForSequenceClassification

        kwargs["num_labels"] = 1  # the only output is the reward
        return partial(create_model_from_path, architecture=AutoModelForSequenceClassification), kwargs
    return create_model_from_path, kwargs
