"""Units of two dtypes, however nested: every gradient is the mean over the ranks and counts once in the norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.compare import distance
from tests.support.spawn import init_gloo, run_ranks

WIDTH, ROWS = 16, 6
HALF = torch.bfloat16
MESHES = {"fsdp4": {}, "hsdp2": {"mp_replicate_size": 2}}
FROZEN = ("up", "unused", "rare")
LARGE = 100  # elements; what is larger here gets a unit of its own


class Gate(nn.Module):
    """A float32 matrix that the block round it reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight)


class Block(nn.Module):
    """bf16 matrices beside a float32 vector, a float32 scalar and a module all in float32, which holds another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, dtype=HALF), nn.Linear(WIDTH, WIDTH, dtype=HALF)
        self.sink, self.scale = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.tensor(0.7))
        self.gate = nn.Sequential(Gate(), nn.Sequential(nn.Linear(WIDTH, WIDTH)))
        self.unused, self.rare = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            x = x + self.rare
        gate = self.gate(x) * self.gate[0].weight.mean(0)
        x = self.up(x.to(HALF)).unflatten(-1, (4, WIDTH)).sum(-2) * (gate + self.sink).sigmoid() * self.scale
        return self.down(x.to(HALF))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)  # float32
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(self.norm(x).to(HALF))
        return x


class Model(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Embedding(32, WIDTH), Layer(), Layer(), nn.LayerNorm(WIDTH))
        self.lm_head = nn.Linear(WIDTH, 32, bias=False, dtype=HALF)
        self.bonus = nn.Parameter(torch.ones(WIDTH, dtype=HALF))  # read by the root itself

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.base(ids).to(HALF) * self.bonus)


def backward(model: nn.Module, ids: Tensor) -> None:
    for half in ids.chunk(2):  # two micro-batches: accumulation
        F.cross_entropy(model(half).float(), half).backward()


def train(sizes: dict[str, Any], freeze: bool) -> dict[str, Any]:
    """Rank function: distances of all gradients from the mean of what each rank's whole copy has, and both norms."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from hf_fsdpturbo import grad_norm
    from hf_fsdpturbo.sharding import unit_dtypes
    from hf_fsdpturbo.sharding.outer_fsdp import check_ownership, outer_fully_shard
    from hf_fsdpturbo.shards import whole_tensor
    from tests.support.topologies import fresh_state

    init_gloo()
    unit_dtypes.SMALL = LARGE
    state = fresh_state(4, **sizes)
    torch.manual_seed(0)
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not (freeze and name.split(".")[-1 - name.endswith((".weight", ".bias"))] in FROZEN)
    plain = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    options = {"mp_policy": policy, "reshard_after_forward": True}
    units = outer_fully_shard(model, state.dense_mesh, ignored=set(), options=options)
    check_ownership(model, units.whole)
    ids = torch.randint(0, 32, (ROWS,), generator=torch.Generator().manual_seed(dist.get_rank()))
    backward(model, ids)
    backward(plain, ids)
    groups = grad_norm.parameter_groups(model)
    grad_norm.average_replicated_gradients_(groups)
    off, squares, unused, without = {}, 0.0, [], []
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if not theirs.requires_grad:
            continue
        mean = torch.zeros(theirs.shape) if theirs.grad is None else theirs.grad.float()
        used = torch.tensor(float(theirs.grad is not None))
        dist.all_reduce(mean)
        dist.all_reduce(used)
        mean /= dist.get_world_size()
        if not used:
            unused.append(name)
        if mine.grad is None:
            without.append(name)
            continue
        off[name] = distance(whole_tensor(mine.grad).float(), mean)
        squares += float(mean.double().square().sum())
    whole = sorted(name for name, parameter in model.named_parameters() if parameter in units.whole)
    norm = float(grad_norm.clip_groups_(groups, float("inf"))["total"])
    found = {"off": off, "norm": norm, "expected": squares**0.5, "unused": unused, "without": without}
    return {**found, "units": units.names, "whole": whole, "frozen": freeze}


@pytest.fixture(scope="module", params=[(mesh, freeze) for mesh in MESHES for freeze in (False, True)], ids=str)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    mesh, freeze = request.param
    return run_ranks(train, 4, MESHES[mesh], freeze, timeout=60)[0]


def test_every_gradient_is_the_mean_over_ranks(found):
    """Float32 parameters to float32's rounding, bf16 ones to theirs; two micro-batches are summed in float32 here."""
    half = ("up.weight", "up.bias", "down.weight", "down.bias", "head.weight", "bonus")
    for name, off in found["off"].items():
        assert off < (1e-2 if name.endswith(half) else 1e-5), (name, off)


def test_what_no_rank_used_has_no_gradient(found):
    """None, as in one process: AdamW's decay moves a weight whose gradient is zero. One rank's use is enough."""
    assert found["without"] == found["unused"]
    assert len(found["unused"]) == (0 if found["frozen"] else 4)
    assert any(name.endswith("rare") for name in found["off"]) is not found["frozen"]


def test_norm_counts_each_element_once(found):
    assert found["norm"] == pytest.approx(found["expected"], rel=2e-3)


def test_large_ones_are_sharded_where_their_readers_run(found):
    """The block that reads the gate's weight, never the gate alone; the embedding in the base, never in the root."""
    if found["frozen"]:
        return  # then most of what trains in a layer is float32, and the bf16 rest is what needs another place
    blocks = [f"base.{layer}.blocks.{block}" for layer in (1, 2) for block in (0, 1)]
    assert set(found["units"]) == {"base.1", "base.2", *blocks, "base", "(root)"}
    inside = ("sink", "scale", "gate.1.0.bias", "unused", "rare")
    small = {"norm.weight", "norm.bias", *(f"blocks.{block}.{name}" for block in (0, 1) for name in inside)}
    layers = {f"base.{layer}.{name}" for layer in (1, 2) for name in small}
    assert set(found["whole"]) == layers | {"base.3.weight", "base.3.bias"}
