"""Weights that do not come slice by slice from the model's files: read by rank 0 alone, or from a DCP directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_fsdpturbo.checkpoint import commit, dcp, facts
from hf_fsdpturbo.checkpoint.agreement import together
from hf_fsdpturbo.checkpoint.boxes import Box, local_box, local_tensor, transport_device


def load_dcp(model: nn.Module, path: str) -> None:
    """Fill a model in place from a DCP directory, or from a ``checkpoint-N`` that holds one; dtypes are converted.

    Keys may be those of the model, or those with ``model.`` before them.

    Raises:
        CheckpointError: not a DCP directory, another model; on every rank.
    """
    with together(f"dcp_path={path}"):
        directory = os.path.join(path, dcp.DCP_DIR) if os.path.isdir(os.path.join(path, dcp.DCP_DIR)) else path
        if directory != path and not commit.is_finished(path):
            raise ValueError(f"{path} has no {commit.COMPLETE}: it was not finished. Choose another checkpoint.")
        metadata = dcp.read_metadata(directory)
        wanted = dcp.model_tensors(model)
        prefix = "model." if f"model.{next(iter(wanted))}" in metadata.state_dict_metadata else ""
        saved = dcp.saved_shapes(metadata, prefix)
        if not prefix:  # such a directory may hold an optimizer beside the model
            saved = {name: entry for name, entry in saved.items() if name in wanted}
        dcp.check_fit(directory, saved, wanted, same_dtype=False)
    dcp.read_into(directory, {f"{prefix}{name}": tensor for name, tensor in wanted.items()})


def copy_shards(target: nn.Module, source: nn.Module) -> None:
    """Copy one sharded model into another of the same class and layout; nothing is communicated."""
    theirs = dcp.model_tensors(source)
    with torch.no_grad():
        for name, tensor in dcp.model_tensors(target).items():
            local_tensor(tensor).copy_(local_tensor(theirs[name]))


def own_class(model: nn.Module) -> Any:
    """The class a model had before FSDP put its own in front."""
    return next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))


@contextlib.contextmanager
def weights_from_rank0(whole: nn.Module | None, device: torch.device) -> Iterator[None]:
    """While open, ``from_pretrained`` fills sharded models from rank 0's whole one instead of from files.

    The static method of Transformers that reads the files is replaced for the length of the context, in this process.

    Args:
        whole: the whole model on rank 0, None elsewhere.
        device: where shards live.
    """
    from transformers import PreTrainedModel
    from transformers.utils.loading_report import LoadStateDictInfo

    own = PreTrainedModel.__dict__["_load_pretrained_model"]

    def fill(model: nn.Module, state_dict: Any, files: Any, load_config: Any, *args: Any) -> tuple[Any, None]:
        scatter_model(model, whole, device, load_config.weight_mapping)
        return LoadStateDictInfo(set(), set(), set(), [], {}, set()), None

    PreTrainedModel._load_pretrained_model = staticmethod(fill)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = own  # type: ignore[method-assign]


def scatter_model(model: nn.Module, whole: nn.Module | None, device: torch.device, conversions: list[Any]) -> None:
    """Give a model on meta its shards and fill them from rank 0, tensor by tensor; collective."""
    materialize(model, device)
    targets = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    sources = whole.state_dict() if whole is not None else {}
    with together("init_on_rank0"):
        boxes = {name: local_box(tensor) for name, tensor in targets.items()}
        if whole is not None and (lost := sorted(targets.keys() - sources.keys())):
            raise ValueError(f"rank 0's model lacks {lost[:5]}.")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, boxes)
    for name, target in targets.items():
        _scatter(target, sources.get(name), [boxes[name] for boxes in everyone])
    used = [facts.hub_conversions(whole) if whole is not None else None]
    dist.broadcast_object_list(used, src=0)
    if used[0] is not None:
        kept = [c for c in conversions if facts.conversion_key(c) in used[0]]
        cast(Any, model)._weight_conversions = kept


def materialize(model: nn.Module, device: torch.device) -> None:
    """Memory for parameters and persistent buffers that are on meta; ties stay. Marked as initialised."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(_empty(parameter, device), requires_grad=parameter.requires_grad)
                    made[parameter]._is_hf_initialized = True  # type: ignore[attr-defined]
                module._parameters[name] = made[parameter]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                module._buffers[name]._is_hf_initialized = True  # type: ignore[union-attr]


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    local = torch.empty(tensor.to_local().shape, dtype=tensor.dtype, device=device)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _scatter(target: Tensor, source: Tensor | None, boxes: list[Box]) -> None:
    """Rank 0 sends every rank its box of one tensor."""
    local = local_tensor(target)
    channel = transport_device(local)

    def part(box: Box) -> Tensor:
        assert source is not None
        return source[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]

    operations, received = [], None
    if dist.get_rank() == 0:
        for receiver, box in enumerate(boxes[1:], 1):
            if 0 not in box.shape:
                sent = part(box).to(device=channel, dtype=local.dtype).contiguous()
                operations.append(dist.P2POp(dist.isend, sent, receiver))
    elif local.numel():
        received = torch.empty(local.shape, dtype=local.dtype, device=channel)
        operations.append(dist.P2POp(dist.irecv, received, 0))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    with torch.no_grad():
        if dist.get_rank() == 0:
            local.copy_(part(boxes[0]))
        elif received is not None:
            local.copy_(received)


def load_on_rank0(load: Callable[[], nn.Module]) -> nn.Module | None:
    """The whole model on the CPU of rank 0, None elsewhere; an unreadable file is raised on every rank."""
    whole = None
    with together("init_on_rank0"):
        if dist.get_rank() == 0:
            whole = load()
    return whole
