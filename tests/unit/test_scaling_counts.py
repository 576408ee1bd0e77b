"""What a run of 1,024 ranks asks for, counted on simulated ones: counts, never times."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from benchmarks import dispatch_bytes
from benchmarks.export_planning import MODELS
from benchmarks.simulated_ranks import counted_new_groups, fake_world
from hf_fsdpturbo.checkpoint.dcp_save import WRITERS, own_parts
from hf_fsdpturbo.dispatch.packed_rows import PackedLayout
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.shards import Box
from hf_fsdpturbo.topology import Topology


def groups_made(world: int, rank: int = 0, **sizes: int) -> list[int]:
    """Ranks of every group that one rank takes part in making."""
    with fake_world(rank, world), counted_new_groups() as made:
        FSDPTurboParallelState(Topology.resolve(world, **sizes), "cpu", None)
    return made


@pytest.mark.parametrize("world", [8, 64, 256, 1024])
def test_groups_of_a_plain_run(world: int):
    """ep 8: a group for each of W / 8 ep groups and 8 efsdp groups (none where one is the world), one of this rank."""
    made = groups_made(world, ep_size=8)
    assert sum(size > 1 for size in made) == (0 if world == 8 else world // 8 + 8)
    assert [size for size in made if size == 1] == [1]


@pytest.mark.parametrize(
    "sizes",
    [
        {"ep_size": 1},
        {"ep_size": 64},
        {"ep_size": 1, "efsdp_size": 1},
        {"ep_size": 8, "efsdp_size": 1},
        {"ep_size": 8, "efsdp_size": 8},
        {"ep_size": 8, "cp_size": 2},
        {"ep_size": 64, "mp_replicate_size": 8},
    ],
    ids=str,
)
def test_no_rank_makes_another_rank_s_own_group(sizes: dict[str, int]):
    for rank in (0, 63):
        assert sum(size == 1 for size in groups_made(64, rank, **sizes)) == 1


def test_groups_over_nodes_are_two_a_rank():
    """No mesh axis more: that would make a group for every slice of the others."""
    plain, nodes = (groups_made(1024, ep_size=64, ranks_per_node=near) for near in (1024, 8))
    assert sorted(nodes) == sorted([*plain, 8, 8])


@pytest.mark.parametrize(("ep_size", "one", "two"), [(16, 9.7, 2.9), (32, 16.3, 8.0), (64, 20.1, 13.8)])
def test_bytes_between_nodes_of_8_ranks(ep_size: int, one: float, two: float):
    """Qwen3-235B: MiB a token, forward and backward, 94 layers; and the rows are those of the formula in the docs."""
    sizes, near = dispatch_bytes.sizes_of(MODELS["Qwen3-235B-A22B"][1]), 8
    index = dispatch_bytes.random_index(2048, sizes.top_k, sizes.experts, 0.0, ep_size)
    rows = dispatch_bytes.rows_away(index, sizes.experts, ep_size, near)
    layer = dispatch_bytes.step_bytes(rows, PackedLayout(sizes.hidden, sizes.top_k, torch.bfloat16))
    mebi = {name: count * sizes.layers / len(index) / 2**20 for name, count in layer.items()}
    assert mebi["one stage"] == pytest.approx(one, rel=0.02)
    assert mebi["two stages"] == pytest.approx(two, rel=0.02)
    nodes = ep_size // near
    for name, parts, away in (("one stage", ep_size, ep_size - near), ("two stages", nodes, nodes - 1)):
        none = math.comb(sizes.experts - sizes.experts // parts, sizes.top_k) / math.comb(sizes.experts, sizes.top_k)
        assert rows[name] / len(index) == pytest.approx(away * (1 - none), rel=0.02)
    even = dispatch_bytes.break_even(sizes, layer["two stages"] / len(index), nodes, near)
    paper = sizes.experts / near * 3 * sizes.ffn * (1 - 1 / nodes) / (rows["two stages"] / len(index))
    assert even == pytest.approx(paper, rel=0.01)  # the formula leaves out the tails of slots and weights


def test_axes_of_one_rank_have_a_group():
    """FSDP asks for it, also where there is nobody to talk to; the layout is that of torch's own mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    with fake_world(5, 16):
        state = FSDPTurboParallelState(Topology.resolve(16, ep_size=8, efsdp_size=1), "cpu", None)
        plain = init_device_mesh("cpu", (2, 1, 8, 1), mesh_dim_names=state.expert_mesh.mesh_dim_names)
        assert state.expert_mesh.mesh.tolist() == plain.mesh.tolist()
        assert list(state.expert_mesh.get_coordinate()) == list(plain.get_coordinate()) == [0, 0, 5, 0]
        ranks = [state.expert_mesh.get_group(axis).size() for axis in range(4)]
        assert ranks == [plain.get_group(axis).size() for axis in range(4)] == [2, 1, 8, 1]
        assert [state.expert_fsdp_mesh.get_group(axis).size() for axis in (0, 1)] == [2, 1]


def written_by(rank: int, replicas: int) -> list[tuple[str, Box]]:
    """Parts that one of 32 ranks writes of 64 tensors, under HSDP with this many replicas, and of a plain one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    with fake_world(rank, 32):
        mesh = init_device_mesh("cpu", (replicas, 32 // replicas))
        local = torch.empty(2, 3, device="meta")
        state: dict = {
            f"w{i}": DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False) for i in range(64)
        }
        return [(part.key, part.box) for part, _ in own_parts({**state, "plain": torch.zeros(2)})]


@pytest.mark.parametrize("replicas", [1, 4, 16])
def test_replicas_write_one_copy_together(replicas: int):
    """Every part once, nobody idle among the up to eight replicas that take turns."""
    parts = [written_by(rank, replicas) for rank in range(32)]
    of_key = Counter(part for own in parts for part in own)
    assert set(of_key.values()) == {1}
    assert len(of_key) == 64 * (32 // replicas) + 1
    assert ("plain", Box((0,), (2,))) in parts[0]
    writers = sum(bool(own) for own in parts)
    assert writers == min(replicas, WRITERS) * (32 // replicas)


def test_a_save_gathers_digests_and_makes_its_index_once():
    from benchmarks import scaling

    found = scaling.index(8)
    assert found["F5 KiB gathered of all ranks"] * 1024 < 128 * 8
    assert found["F5 lists that rank 0 reads, later saves"] == 0
    assert found["F5 KiB of a rank's list, Qwen3-235B (564 keys)"] < 24
    assert scaling.index_reads(64) == {"F4 reads of the index in a resume, a node": 1, "F4 the same, all nodes": 8}
