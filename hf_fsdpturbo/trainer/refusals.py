"""What a trainer cannot take, seen only once the model or a batch is there: refused by name, or warned about once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_fsdpturbo import compat
from hf_fsdpturbo.images import IMAGE_KEYS
from hf_fsdpturbo.lora.adapter_files import is_adapter, is_peft
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.parallelize.order import ShardingReport
from hf_fsdpturbo.parallelize.trainer_family import trl_classes
from hf_fsdpturbo.quantised.asked import asked_for
from hf_fsdpturbo.quantised.methods import refuse_quantised
from hf_fsdpturbo.trainer.given_arguments import GivenArguments

PACKAGES_OF_REPORTS = {
    "tensorboard": "tensorboard (or tensorboardX)",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "swanlab": "swanlab",
    "comet_ml": "comet_ml",
    "clearml": "clearml",
}
"""Values of report_to whose absence Transformers finds out only when it makes the callback, and what each needs."""


def is_transformers_model(model: Any) -> bool:
    """Whether a model object is one of Transformers' (with an adapter or without): the others have no config."""
    return isinstance(model.get_base_model() if is_peft(model) else model, PreTrainedModel)


def refuse_model(given: GivenArguments, world_size: int) -> None:
    """Refuse trainer arguments that build or change the model past our loader (spec section 14).

    Args:
        given: the trainer's arguments by name.
        world_size: one process takes what plain Trainer takes.

    Raises:
        ValueError: naming the argument.
    """
    if world_size > 1 and given.get("model_init") is not None:
        raise ValueError(
            "model_init is not supported in a run of several processes: it makes the model past the sharded loader. "
            "Pass model, a path or an object."
        )
    asked_for({"quantization_config": given.get("quantization_config")})
    model = given.get("model")
    if world_size > 1 and isinstance(model, nn.Module) and not is_transformers_model(model):
        raise ValueError(
            f"model is a {type(model).__name__}, which is no Transformers model (PreTrainedModel): only those are "
            "sharded. Train it in one process, or with DDP and transformers.Trainer."
        )
    config = getattr(model, "config", None)
    if getattr(config, "distributed_config", None) is not None or getattr(model, "_device_mesh", None) is not None:
        raise ValueError(
            "model was loaded with its own distributed_config, but sharding is done by hf_fsdpturbo. Load it without."
        )
    refuse_quantised(config, "model", getattr(model, "hf_quantizer", None))


def frozen_in_four_bits(given: GivenArguments, config: Any) -> bool:
    """Whether frozen weights are to be in 4 bits; they must be frozen.

    Raises:
        ValueError: there is no adapter, so they would be trained.
    """
    own, kwargs = given.get("quantization_config"), getattr(config, "model_init_kwargs", None) or {}
    asked = asked_for({"quantization_config": own}) if own is not None else asked_for(kwargs, "model_init_kwargs ")
    model = given.get("model")
    if asked is None or given.get("peft_config") is not None or is_peft(model) or is_adapter(model):
        return asked is not None
    raise ValueError(
        f"load_in_4bit=True ({asked}) freezes the model's weights, and without an adapter nothing would train. Pass "
        "peft_config (--use_peft), or leave load_in_4bit out to train in full."
    )


def refuse_optimizers(given: GivenArguments, world_size: int) -> None:
    """Refuse an optimizer, or a scheduler (which holds one), made before the parameters are replaced by shards.

    It would go on updating the old ones: nothing would train, without an error.

    Raises:
        ValueError: naming what was given.
    """
    pair = given.get("optimizers") or ()
    found = [kind for kind, value in zip(("optimizer", "scheduler"), pair, strict=False) if value is not None]
    if world_size > 1 and found:
        raise ValueError(
            f"optimizers has a {' and a '.join(found)} made before the model is sharded, which would train parameters "
            "that the model no longer has. Pass optimizer_cls_and_kwargs (or optim and lr_scheduler_type), or "
            "override create_optimizer and create_scheduler, which are called on the sharded model."
        )


def refuse_foreign_parameters(optimizer: Any, model: Any) -> None:
    """Refuse an optimizer whose groups hold parameters that the (sharded) model does not have: they would not train.

    Raises:
        ValueError: how many there are, and what to do.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    own = set(model.parameters())
    foreign = sum(parameter not in own for group in optimizer.param_groups for parameter in group["params"])
    if foreign:
        raise ValueError(
            f"optimizer_cls_and_kwargs: {foreign} parameters of the optimizer's groups are not the trained model's. "
            "They were taken from a model before it was sharded, and nothing would train. Override create_optimizer "
            "and make groups of self.model.named_parameters() there."
        )


def refuse_missing_packages(config: Any) -> None:
    """Refuse settings whose package is not there, before the model is loaded rather than after.

    Raises:
        ValueError: naming setting and package.
    """
    from transformers.integrations import get_available_reporting_integrations

    if getattr(config, "use_liger_kernel", False):
        compat.require("liger_kernel", "use_liger_kernel=True")
    wanted, there = config.report_to, get_available_reporting_integrations()
    for name in wanted if isinstance(wanted, list) else [wanted]:
        if name in PACKAGES_OF_REPORTS and name not in there:
            raise ValueError(
                f"report_to={name!r} needs {PACKAGES_OF_REPORTS[name]}, which is not installed. Install it, or set "
                "report_to to 'none'."
            )


def refuse_accelerate(accelerator: Any) -> None:
    """Refuse an accelerate configuration that shards as well.

    Raises:
        ValueError: naming ``distributed_type``.
    """
    kind = str(accelerator.distributed_type)
    if any(name in kind for name in ("FSDP", "DEEPSPEED", "MEGATRON")):
        raise ValueError(
            f"distributed_type is {kind}, but sharding is done by hf_fsdpturbo. Set distributed_type: MULTI_GPU "
            "(MULTI_NPU on Ascend; MULTI_GPU with use_cpu: true on CPU) in the accelerate config."
        )


def refuse_unsharded(model: Any, was_sharded: bool) -> None:
    """Refuse to go on in a run of several processes whose model did not come through our loader.

    Raises:
        ValueError: the trainer's own ``__init__`` made or replaced the model.
    """
    if not was_sharded or not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"The trainer's model ({type(model).__name__}) was not sharded: a class behind FSDPTurboTrainerMixin "
            "makes it in its own __init__. Take model (a path or an object) as an argument there, and pass it on."
        )


# Callbacks that copy the model, or read a checkpoint as plain Transformers writes it; by class name.
_FOREIGN_CALLBACKS = {
    "BEMACallback": "it keeps a whole copy of the model and loads the model's state dict into it",
    "MergeModelCallback": "it loads checkpoint-N as plain Transformers does, which holds shards here",
    "PEFTAdapterEMACallback": "it copies adapter weights between whole models",
}


def refuse_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse callbacks that cannot work on a sharded model, before training.

    Raises:
        ValueError: naming the callback.
    """
    for callback in callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in _FOREIGN_CALLBACKS:
                reason = _FOREIGN_CALLBACKS[cls.__name__]
                raise ValueError(
                    f"callbacks: {cls.__name__} is not supported on a sharded model: {reason}. Leave it out, or train "
                    "in one process."
                )


def refuse_resizing(model: Any) -> None:
    """Make ``resize_token_embeddings`` of a sharded model say what to do; a size that changes nothing passes.

    Sets the method on the instance; it raises ValueError naming both sizes.
    """
    own = getattr(model, "resize_token_embeddings", None)
    if own is None:
        return

    def refuse(new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        size = model.get_input_embeddings().weight.shape[0]
        if new_num_tokens in (None, size) and not args and not kwargs:
            return model.get_input_embeddings()
        raise ValueError(
            f"resize_token_embeddings({new_num_tokens}): the model is sharded, and its {size} embeddings cannot be "
            "resized any more. Resize the model before it is given to the trainer, or in the checkpoint."
        )

    model.resize_token_embeddings = refuse


def refuse_images(inputs: Any, report: ShardingReport | None) -> None:
    """Refuse batches with images where ranks without would not join those that have some.

    Args:
        inputs: a batch.
        report: what was sharded, and why no images can be (None: all ranks join).

    Raises:
        ValueError: naming the keys.
    """
    why_not = None if report is None else report.no_images
    if why_not is None or not isinstance(inputs, Mapping):
        return
    found = [key for key in IMAGE_KEYS if inputs.get(key) is not None]
    if found:
        raise ValueError(f"The batch has images ({found}), but {why_not}.")


def aux_loss_warning(trainer_class: type, model: Any, config: Any) -> str | None:
    """One line where Transformers scales the router aux loss wrongly (transformers#48690), else None.

    Its Trainer multiplies the model's loss, aux loss included, by the number of processes, and leaves out the division
    by accumulation steps. TRL adds the aux loss itself, rightly. Goes when the issue is closed.
    """
    text = model.config.get_text_config() if is_transformers_model(model) else None
    if trl_classes(trainer_class) or not getattr(text, "output_router_logits", False):
        return None
    times = config.world_size * getattr(config, "gradient_accumulation_steps", 1)
    if times == 1:
        return None
    return (
        f"[hf_fsdpturbo] output_router_logits: transformers.Trainer counts the router aux loss {times} times "
        "(processes x accumulation steps, transformers#48690). Kept as upstream has it; TRL's trainers count it once."
    )


def refuse_search(parallel_state: FSDPTurboParallelState | None) -> None:
    """Raises ``ValueError`` in a sharded run: each trial would build a new model past the sharded loader."""
    if parallel_state is not None:
        raise ValueError("hyperparameter_search rebuilds the model for each trial: start one run a trial.")
