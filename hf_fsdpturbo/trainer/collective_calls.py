"""What users call on a trainer, its model and its accelerator that all ranks must call: announced, or done for shards.

``install(trainer)`` puts these names on the instances, so that the outermost call counts, also one that a subclass
overrides. A call that only some ranks make is then named (``watcher.py``) instead of hanging.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_fsdpturbo.checkpoint.dcp import model_tensors
from hf_fsdpturbo.lora.adapter import trained_adapter
from hf_fsdpturbo.lora.adapter_files import is_peft
from hf_fsdpturbo.ranks import rank
from hf_fsdpturbo.watcher import all_call

TRAINER_CALLS = ("save_model", "save_merged_model", "evaluate", "predict", "push_to_hub")


def install(trainer: Any) -> None:
    """For a trainer in a run of several processes, once its model is sharded."""
    for name in TRAINER_CALLS:
        setattr(trainer, name, announced(getattr(trainer, name), name, trainer._hang.paused))
    model = trainer.model
    if hasattr(model, "generate"):
        model.generate = announced(model.generate, "generate", trainer._hang.paused)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = _SavePretrained(trainer, model.save_pretrained)
    trainer.accelerator.get_state_dict = announced(whole_state_dict, "get_state_dict", trainer._hang.paused)


def announced(function: Callable[..., Any], name: str, paused: Callable[[], Any]) -> Callable[..., Any]:
    """``function``, entered by all ranks together, while the watch for hangs is ``paused``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with paused():
            all_call(name)
            return function(*args, **kwargs)

    return call


def whole_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
    """In place of ``accelerator.get_state_dict``: whole tensors on the CPU of rank 0, none elsewhere; collective.

    One tensor at a time is whole on the device; rank 0's host memory holds the model.
    """
    whole: dict[str, Tensor] = {}
    for name, tensor in model_tensors(model).items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if rank() == 0:
            whole[name] = full.detach().to("cpu", copy=True)
    return whole


class _SavePretrained:
    """In place of a sharded model's ``save_pretrained``: what ``save_model`` writes, by all ranks together.

    With a ``state_dict`` (whole tensors, as from ``accelerator.get_state_dict``) it is the model's own, on rank 0.
    """

    def __init__(self, trainer: Any, own: Callable[..., Any]) -> None:
        self.trainer, self.own = trainer, own

    def __call__(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        max_shard_size: Any = None,
        safe_serialization: bool = True,
        save_function: Any = None,
        **kwargs: Any,
    ) -> None:
        """As ``PreTrainedModel.save_pretrained``; ``max_shard_size`` only together with a ``state_dict``.

        Raises:
            ValueError: an option that has no meaning for a sharded model.
            CheckpointError: on every rank, if one could not write.
        """
        if state_dict is not None:
            sizes = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
            if is_peft(self.trainer.model):  # a preference trainer's reference is no part of what is saved
                kwargs.setdefault("selected_adapters", [trained_adapter(self.trainer.model)])
            if is_main_process and rank() == 0:
                self.own(save_directory, state_dict=state_dict, **sizes, **kwargs)
            return
        options = {**kwargs, "max_shard_size": max_shard_size}
        given = sorted(name for name, value in options.items() if value not in (None, False))
        if given:
            raise ValueError(
                f"save_pretrained of a sharded model takes no {', '.join(given)}. Leave them out (the trainer's "
                "hub_file_bytes is the size of a file, its push_to_hub() uploads), or pass "
                "state_dict=trainer.accelerator.get_state_dict(model), which gathers the model on rank 0."
            )
        with self.trainer._hang.paused():
            all_call("save_pretrained")
            self.trainer._saving.save_model(str(save_directory))
