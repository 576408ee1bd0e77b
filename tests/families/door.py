"""The only file of the sweep that knows the package: how a family is loaded, sharded and saved by it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from tests.support.topologies import fresh_state, plain_arguments

LAYOUTS = {
    "ep2": {"ep_size": 2},
    "ep4": {"ep_size": 4},
    "cp2": {"cp_size": 2},
    "cp2_ep2": {"cp_size": 2, "ep_size": 2},
    "ep2_efsdp2": {"ep_size": 2, "efsdp_size": 2},
    "ep2_hsdp2": {"ep_size": 2, "mp_replicate_size": 2},
}


def _arguments(bf16: bool) -> Any:
    return plain_arguments(bf16=bf16)


def world_of(layout: str) -> int:
    """Ranks of a layout."""
    sizes = LAYOUTS[layout]
    return math.prod(sizes.values())


def load(
    path: str, layout: str, *, dtype: str = "float32", bf16: bool | None = None, with_images: bool = False
) -> Any:
    """A model by path, sharded, through the loader of TRL's trainers (the class that the checkpoint names).

    ``dtype``: stored in. ``bf16``: compute in bf16; None: if stored in it. ``with_images``: batches may have some.
    """
    from hf_fsdpturbo import FSDPTurboSFTTrainer
    from hf_fsdpturbo.parallelize.build import build_model

    state = fresh_state(dist.get_world_size(), **LAYOUTS[layout])
    arguments = _arguments(dtype == "bfloat16" if bf16 is None else bf16)
    kwargs = {"defaults": {"dtype": dtype}, "with_images": with_images}
    return build_model(FSDPTurboSFTTrainer, path, arguments, state, **kwargs)[0]


def shard(model: Any, layout: str) -> Any:
    """A whole model object, sharded; computes in bf16 if it is stored so."""
    from hf_fsdpturbo.parallelize.build import shard_given_model

    state = fresh_state(dist.get_world_size(), **LAYOUTS[layout])
    return shard_given_model(model, _arguments(model.dtype == torch.bfloat16), state)[0]


def save(model: Any, directory: str, *, generates: bool = True) -> None:
    """``save_model`` of a trainer that trained nothing, given a path or a model object; a plain one in one process.

    ``generates``: whether it is a language model, which TRL's trainer asks for; else it is Transformers' own.
    """
    import transformers
    import trl
    from datasets import Dataset

    import hf_fsdpturbo
    from tests.support.reference_run import forget_accelerate
    from tests.support.tiny_models import tiny_tokenizer

    forget_accelerate()
    arguments = {"output_dir": directory, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    sharded = dist.is_initialized()
    if sharded:
        fresh_state(dist.get_world_size(), **LAYOUTS["ep2"])
        arguments["ep_size"] = 2
    owner, prefix = (hf_fsdpturbo, "FSDPTurbo") if sharded else (trl if generates else transformers, "")
    kind, config = ("SFTTrainer", "SFTConfig") if generates else ("Trainer", "TrainingArguments")
    trainer = getattr(owner, prefix + kind)(
        model=model,
        args=getattr(owner, prefix + config)(**arguments),
        train_dataset=Dataset.from_dict({"input_ids": [[3, 4, 5, 6]] * 4}),
        processing_class=tiny_tokenizer(),
    )
    trainer.save_model(directory)


def settle(model: Any) -> None:
    """Average what no FSDP unit reduces, as the trainer does before it clips; collective."""
    from hf_fsdpturbo import grad_norm

    grad_norm.average_replicated_gradients_(grad_norm.parameter_groups(model))


def data_place(layout: str) -> tuple[int, int]:
    """This rank's place among those that have batches of their own, and their number; cp ranks share one."""
    cp_size = LAYOUTS[layout].get("cp_size", 1)
    return dist.get_rank() // cp_size, dist.get_world_size() // cp_size
