"""What a run starts with, in a person's words: parameters, what a rank holds, dtypes, and the layout in four lines."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_fsdpturbo.quantised.packed_weight import is_statistic
from hf_fsdpturbo.shards import local_tensor
from hf_fsdpturbo.topology import Topology
from hf_fsdpturbo.trainer.layout_drawing import drawn

GIB = 2**30
_STATES = {"adam": 2, "sgd": 0}
"""Optimizer's name begins with -> states as large as the weights; SGD's momentum is not asked for here."""


def start_lines(model: nn.Module, args: Any, sizes: Topology, report: Any) -> list[str]:
    """Lines for rank 0.

    Args:
        model: sharded or whole; this rank's share of it is counted.
        args: the training arguments.
        sizes: of the run.
        report: the run's ``ShardingReport``, None where no model was given.
    """
    parameters = dict(model.named_parameters())
    weights = {name: parameter for name, parameter in parameters.items() if not is_statistic(name)}
    if not parameters:
        return []
    routed = sum(_numel(p) for name, p in weights.items() if "experts" in name.split("."))
    total = sum(map(_numel, weights.values()))
    trained = sum(_numel(parameter) for parameter in weights.values() if parameter.requires_grad)
    counts = f"{_count(total)} parameters"
    if routed:
        counts += f": {_count(routed)} in experts, {_count(total - routed)} dense"
    counts += "; all are trained" if trained == total else f"; {_count(trained)} are trained"
    lines = [f"{type(model).__name__.removeprefix('FSDP')}: {counts}", _held(parameters, args)]
    if sizes.world_size > 1:
        lines += drawn(sizes, getattr(report, "num_experts", 0))
    return [f"[hf_fsdpturbo] {line}" for line in lines]


def _held(parameters: dict[str, nn.Parameter], args: Any) -> str:
    """What a rank holds, GiB, and in which dtypes."""
    local = [(local_tensor(parameter.detach()), parameter.requires_grad) for parameter in parameters.values()]
    weights = sum(tensor.nbytes for tensor, _ in local)
    trained = sum(tensor.nbytes for tensor, is_trained in local if is_trained)
    by_dtype: dict[str, int] = {}
    for tensor, _ in local:
        dtype = str(tensor.dtype).removeprefix("torch.")
        by_dtype[dtype] = by_dtype.get(dtype, 0) + tensor.nbytes
    stored = sorted(by_dtype.items(), key=lambda entry: -entry[1])
    dtypes = ", ".join(f"{dtype} {share:.0%}" if len(stored) > 1 else dtype for dtype, share in _shares(stored))
    optimizer = str(getattr(args.optim, "value", args.optim))
    states = next((count for name, count in _STATES.items() if optimizer.startswith(name)), None)
    in_blocks = "bit" in optimizer  # moments of fewer bits than the weights
    moments = f", {states * trained / GIB:.2f} of {optimizer}" if states is not None and not in_blocks else ""
    compute = "bfloat16" if getattr(args, "bf16", False) else "the dtype of the weights"
    where = " on the host" if args.fsdpturbo_params.offload_params else ""
    return (
        f"this rank holds {weights / GIB:.2f} GiB of weights ({dtypes}), then {trained / GIB:.2f} of gradients"
        f"{moments}{where}; it computes in {compute}"
    )


def _numel(parameter: nn.Parameter) -> int:
    """Numbers that a parameter holds: two a byte where it is packed in 4 bits."""
    return parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)


def _shares(stored: list[tuple[str, int]]) -> list[tuple[str, float]]:
    total = max(1, sum(size for _, size in stored))
    return [(dtype, size / total) for dtype, size in stored]


def _count(number: int) -> str:
    """``30.53 B``, ``3.21 M``, ``812``."""
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
