"""Filling a sharded model again from Hub files: a second one is loaded beside it for a moment."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdpturbo.checkpoint import dcp
from hf_fsdpturbo.images import tower_use
from hf_fsdpturbo.loading.seam import load_sharded
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.parallelize.order import parallelize_model, shard_device
from hf_fsdpturbo.shards import local_tensor

if TYPE_CHECKING:
    from hf_fsdpturbo.arguments import FSDPTurboArguments


def reload_weights(
    model: Any, directory: str, config: FSDPTurboArguments, state: FSDPTurboParallelState | None
) -> None:
    """Fill a (sharded) model in place from Hub files: a second one is loaded beside it for a moment."""
    loader = partial(own_class(model).from_pretrained, dtype=model.dtype)
    if state is None:
        fresh = loader(directory)
    else:
        placed = partial(parallelize_model, args=config, state=state, with_images=tower_use(model) is not None)
        fresh = load_sharded(
            directory,
            loader,
            lambda meta: placed(meta)[0],
            device=shard_device(config),
            check_loading=config.check_loading,
        )
    copy_shards(model, fresh)


def copy_shards(target: nn.Module, source: nn.Module) -> None:
    """Copy one sharded model into another of the same class and layout; nothing is communicated."""
    theirs = dcp.model_tensors(source)
    with torch.no_grad():
        for name, tensor in dcp.model_tensors(target).items():
            local_tensor(tensor).copy_(local_tensor(theirs[name]))


def own_class(model: nn.Module) -> Any:
    """The class a model had before FSDP put its own in front."""
    return next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
