"""Start-up check: a known gradient through every mesh of the run, compared with its value on paper.

Backends and torch versions differ in what they divide (FSDP2 over gloo on torch 2.7 divides nothing), and a wrong
factor is invisible under Adam. Rank r feeds the value v_r = r mod 7 + 1; every gradient must come out as the mean of
all v_r.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.parallelize.routed_experts import route_experts
from hf_fsdpturbo.shards import local_tensor

WIDTH = 8
EXACT, ROUNDED = 1e-4, 1e-2  # relative; a gradient stored in bf16 is rounded to 2^-9


class _DenseProbe(nn.Module):
    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(world_size, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return (self.weight * value).sum()


class _ExpertProbe(nn.Module):
    """Stacked experts that multiply a row by their weight; the layout is Transformers' (one expert a row of dim 0)."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.ones(num_experts, 1, WIDTH))

    def forward(self, rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return rows * self.weight[top_k_index[:, 0], 0] * top_k_weights


def _deviation(parameter: nn.Parameter, expected: float) -> float:
    gradient = parameter.grad
    assert gradient is not None
    local = local_tensor(gradient)
    return float((local.float() - expected).abs().max()) if local.numel() else 0.0


def check_gradient_scale(state: FSDPTurboParallelState, options: dict[str, Any]) -> None:
    """Run both probes with the run's own ``fully_shard`` options; collective over all ranks.

    Raises:
        RuntimeError: on every rank, naming mesh, backend, version and the factor found.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    value, expected = float(rank % 7 + 1), sum(r % 7 + 1 for r in range(world)) / world
    device = torch.device(state.device_type)
    dense = _DenseProbe(world).to(device)
    fully_shard(dense, mesh=state.dense_mesh, **options)
    dense(torch.tensor(value, device=device)).backward()

    found = {f"dense mesh {state.dense_mesh}": (_deviation(dense.weight, expected), expected, EXACT)}
    compute = options["mp_policy"].param_dtype or torch.float32
    for storage in dict.fromkeys((torch.float32, compute)):  # stored apart from the compute dtype, and alike
        found |= _probe_experts(state, options, value, expected, storage, compute)
    _raise_together(found, state.device_type, device)


def _probe_experts(
    state: FSDPTurboParallelState,
    options: dict[str, Any],
    value: float,
    expected: float,
    storage: torch.dtype,
    compute: torch.dtype,
) -> dict[str, tuple[float, float, float]]:
    """What one expert probe found: mesh or exchange -> deviation, value on paper, relative tolerance."""
    count = state.topology.ep_size * state.topology.expert_shard_size
    device = torch.device(state.device_type)
    experts = _ExpertProbe(count).to(device, storage)
    route_experts(experts, count, "eager", state, options)
    rows = torch.full((1, WIDTH), value, device=device, dtype=compute, requires_grad=True)
    weights = torch.ones(1, count, device=device, dtype=compute)
    experts(rows, torch.arange(count, device=device)[None], weights).sum().backward()
    assert rows.grad is not None
    exact = EXACT if storage == torch.float32 else ROUNDED
    mesh = f"expert mesh {state.expert_mesh}, weights stored in {storage}"
    return {
        mesh: (_deviation(experts.weight, expected), expected, exact),
        "expert exchange": (float((rows.grad.float() - count).abs().max()), float(count), EXACT),
    }


def _raise_together(found: dict[str, tuple[float, float, float]], device_type: str, device: torch.device) -> None:
    worst = torch.tensor([deviation / expected for deviation, expected, _ in found.values()], device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    wrong = [
        f"{name}: off by {relative:.3g} of its value {expected:g}"
        for (name, (_, expected, tolerance)), relative in zip(found.items(), worst.tolist(), strict=True)
        if not relative < tolerance
    ]
    if wrong:
        raise RuntimeError(
            f"Gradient scale check failed on backend {dist.get_backend()} ({device_type}), torch {torch.__version__}: "
            f"{'; '.join(wrong)}. Gradients would be wrong; report this with the output of hf-fsdpturbo doctor."
        )
