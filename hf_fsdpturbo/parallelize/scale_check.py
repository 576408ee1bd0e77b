"""Start-up check: a known gradient through every mesh of the run, compared with its value on paper.

Backends and torch versions differ in what they divide (FSDP2 over gloo on torch 2.7 divides nothing), and a wrong
factor is invisible under Adam. Rank r feeds the value v_r = r mod 7 + 1; every gradient must come out as the mean of
all v_r, that of the experts split into one column for each rank of an ep group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.parallelize.routed_experts import route_experts
from hf_fsdpturbo.shards import local_tensor

# Note [Exact at any number of ranks]
# bfloat16 counts to 256: a sum over ep ranks made in it is off by up to 10 % from ep 72 on, in a run where nothing is
# wrong. So no probe sums in the compute dtype. Every expert gets a row of its own from every rank, the row of ep rank
# c is zero but for column c, and each value is an integer below 50. What is summed over ranks is summed in FSDP's
# reduce dtype, float32 in every run.

WIDTH = 8
EXACT, ROUNDED = 1e-4, 1e-2  # relative; a gradient stored in bf16 is rounded to 2^-9


class _DenseProbe(nn.Module):
    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(world_size, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return (self.weight * value).sum()


class _ExpertProbe(nn.Module):
    """Stacked experts that multiply a row by their weight; the layout is Transformers' (one expert a row of dim 0).

    Expert e multiplies by e mod 7 + 1, so a row that went to another expert shows.
    """

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        factors = torch.arange(num_experts) % 7 + 1.0
        self.weight = nn.Parameter(factors.view(-1, 1, 1).expand(-1, 1, width).contiguous())

    def forward(self, rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return rows * self.weight[top_k_index[:, 0], 0] * top_k_weights


@dataclass(frozen=True)
class _Found:
    """What a probe found: the largest deviation relative to the value on paper, that value, what is tolerated."""

    relative: float
    value: float
    tolerance: float


def _deviation(parameter: nn.Parameter, expected: Tensor) -> float:
    """Largest relative deviation of this rank's part of a gradient ``[..., C]`` from ``expected [C]``."""
    gradient = parameter.grad
    assert gradient is not None
    local = local_tensor(gradient)
    expected = expected.to(local.device)  # a gradient may be offloaded
    return float(((local.float() - expected) / expected).abs().max()) if local.numel() else 0.0


def check_gradient_scale(state: FSDPTurboParallelState, options: dict[str, Any]) -> None:
    """Run both probes with the run's own ``fully_shard`` options; collective over all ranks.

    Raises:
        RuntimeError: on every rank, naming mesh, backend, version and the factor found.
    """
    device = torch.device(state.device_type)
    fed = torch.arange(state.topology.world_size, device=device) % 7 + 1.0
    value, mean = fed[dist.get_rank()], fed.mean()
    dense = _DenseProbe(state.topology.world_size).to(_home(options, device))
    fully_shard(dense, mesh=state.dense_mesh, **options)
    dense(value).backward()

    found = {f"dense mesh {state.dense_mesh}": _Found(_deviation(dense.weight, mean), float(mean), EXACT)}
    compute = options["mp_policy"].param_dtype or torch.float32
    for storage in dict.fromkeys((torch.float32, compute)):  # stored apart from the compute dtype, and alike
        found |= _probe_experts(state, options, fed, storage, compute)
    found |= _probe_nodes(state, device)
    _raise_together(found, state.device_type, device)


def _probe_experts(
    state: FSDPTurboParallelState, options: dict[str, Any], fed: Tensor, storage: torch.dtype, compute: torch.dtype
) -> dict[str, _Found]:
    """What one expert probe found by mesh or exchange; ``fed [world]`` is each rank's value."""
    ep_size, device = state.topology.ep_size, fed.device
    count = ep_size * state.topology.expert_shard_size
    experts = _ExpertProbe(count, ep_size).to(_home(options, device), storage)
    factors = experts.weight.detach()[:, 0].float().to(device)
    route_experts(experts, count, "eager", state, options)
    column = _coordinate(state.ep_mesh)
    rows = torch.zeros(count, ep_size, device=device, dtype=compute)
    rows[:, column] = fed[dist.get_rank()].to(compute)
    rows.requires_grad_()
    index = torch.arange(count, device=device)[:, None]
    output = experts(rows, index, torch.ones_like(index, dtype=compute))
    output.sum(1).backward(torch.ones(count, device=device, dtype=compute))
    assert rows.grad is not None
    # See Note [Exact at any number of ranks]: this column's rank in every ep group, over all of them.
    expected = fed.view(state.topology.expert_shape).sum((0, 1, 3)) / fed.numel()
    exact = EXACT if storage == torch.float32 else ROUNDED
    forward = (output.detach().float() - rows.detach().float() * factors).abs().max() / fed[dist.get_rank()]
    backward = ((rows.grad.float() - factors) / factors).abs().max()
    mesh = f"expert mesh {state.expert_mesh}, weights stored in {storage}"
    return {
        mesh: _Found(_deviation(experts.weight, expected), float(fed.mean()), exact),
        "expert exchange": _Found(float(torch.maximum(forward, backward)), 1.0, EXACT),
    }


def _home(options: dict[str, Any], device: torch.device) -> torch.device:
    """Where FSDP asks parameters to be: on the host if it offloads them."""
    return torch.device("cpu") if "offload_policy" in options else device


def _probe_nodes(state: FSDPTurboParallelState, device: torch.device) -> dict[str, _Found]:
    """Each rank's number through both groups of an exchange over nodes: it must come from where it is expected.

    It also makes their communicators before the first step.
    """
    if state.ep_nodes is None:
        return {}
    nodes, ranks_P = state.ep_nodes, state.ep_mesh.mesh.tolist()
    node, place = divmod(_coordinate(state.ep_mesh), nodes.ranks_per_node)
    near = ranks_P[node * nodes.ranks_per_node : (node + 1) * nodes.ranks_per_node]
    found = {}
    for name, group, ranks in (
        ("across nodes", nodes.across, ranks_P[place :: nodes.ranks_per_node]),
        ("inside a node", nodes.inside, near),
    ):
        received = torch.empty(len(ranks), device=device)
        dist.all_to_all_single(received, torch.full_like(received, dist.get_rank()), group=group)
        off = (received - torch.tensor(ranks, device=device)).abs().max()
        found[f"expert exchange {name}"] = _Found(float(off), 1.0, EXACT)
    return found


def _coordinate(mesh: DeviceMesh) -> int:
    """This rank's place on a mesh of one axis."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # every rank is in every mesh of the run
    return int(coordinate[0])


def _raise_together(found: dict[str, _Found], device_type: str, device: torch.device) -> None:
    worst = torch.tensor([one.relative for one in found.values()], device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    wrong = [
        f"{name}: off by {relative:.3g} of its value {one.value:g}"
        for (name, one), relative in zip(found.items(), worst.tolist(), strict=True)
        if not relative < one.tolerance
    ]
    if wrong:
        raise RuntimeError(
            f"Gradient scale check failed on backend {dist.get_backend()} ({device_type}), torch {torch.__version__}: "
            f"{'; '.join(wrong)}. Gradients would be wrong; report this with the output of hf-fsdpturbo doctor."
        )
