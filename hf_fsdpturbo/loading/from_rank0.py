"""Weights that rank 0 alone reads, whole, and sends to every rank slice by slice (``init_on_rank0``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_fsdpturbo.checkpoint import facts
from hf_fsdpturbo.ranks import everyone, from_rank0, rank, together
from hf_fsdpturbo.shards import Box, local_box, local_tensor, materialize, transport_device


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
        nothing = LoadStateDictInfo(
            missing_keys=set(),
            unexpected_keys=set(),
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )
        return nothing, None

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
    theirs = everyone(boxes)
    for name, target in targets.items():
        _scatter(target, sources.get(name), [boxes[name] for boxes in theirs])
    used = from_rank0(facts.hub_conversions(whole) if whole is not None else None)
    if used is not None:
        kept = [c for c in conversions if facts.conversion_key(c) in used]
        cast(Any, model)._weight_conversions = kept


def _scatter(target: Tensor, source: Tensor | None, boxes: list[Box]) -> None:
    """Rank 0 sends every rank its box of one tensor."""
    local = local_tensor(target)
    channel = transport_device(local)

    def part(box: Box) -> Tensor:
        assert source is not None
        return source[box.slices]

    operations, received = [], None
    if rank() == 0:
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
        if rank() == 0:
            local.copy_(part(boxes[0]))
        elif received is not None:
            local.copy_(received)


def load_on_rank0(load: Callable[[], nn.Module]) -> nn.Module | None:
    """The whole model on the CPU of rank 0, None elsewhere; an unreadable file is raised on every rank."""
    whole = None
    with together("init_on_rank0"):
        if rank() == 0:
            whole = load()
    return whole
