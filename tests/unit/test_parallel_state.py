"""Sizes in plain arithmetic, and meshes over a fake process group: who is where, for every rank."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from hf_fsdpturbo import compat, parallel_state
from hf_fsdpturbo.node_groups import make_node_groups
from hf_fsdpturbo.parallel_state import EXPERT_AXES, FSDPTurboParallelState, Topology, get_fsdpturbo_parallel_state


def test_defaults():
    sizes = Topology.resolve(8)
    assert sizes.to_dict() == {
        "world_size": 8,
        "dp_size": 8,
        "cp_size": 1,
        "ep_size": 1,
        "efsdp_size": 8,
        "edp_size": 1,
        "mp_replicate_size": 1,
        "mp_shard_size": 8,
    }


@pytest.mark.parametrize(
    ("world", "given", "shape"),
    [
        (16, {"ep_size": 8}, (1, 2, 8, 1)),  # the example of the specification
        (16, {"ep_size": 16}, (1, 1, 16, 1)),
        (16, {"ep_size": 4, "cp_size": 2}, (1, 2, 4, 2)),
        (16, {"ep_size": 4, "efsdp_size": 2}, (2, 2, 4, 1)),
        (16, {"ep_size": 2, "cp_size": 2, "efsdp_size": 1}, (4, 1, 2, 2)),
        (8, {"dp_size": 4, "cp_size": 2, "ep_size": 4}, (1, 1, 4, 2)),
        (1, {}, (1, 1, 1, 1)),
    ],
)
def test_expert_shape(world: int, given: dict, shape: tuple[int, ...]):
    assert Topology.resolve(world, **given).expert_shape == shape


def test_every_size_that_is_accepted_is_consistent():
    sizes = [1, 2, 3, 4, 6, 8]
    accepted = refused = 0
    choices = ([1, 2, 4, 6, 8, 12], sizes, sizes, [None, 1, 2, 3], [1, 2, 3])
    for world, cp, ep, efsdp, replicate in itertools.product(*choices):
        fits = world % cp == 0 and world // cp % ep == 0 and world % replicate == 0
        fits = fits and (efsdp is None or world // cp // ep % efsdp == 0)
        given = {"cp_size": cp, "ep_size": ep, "efsdp_size": efsdp, "mp_replicate_size": replicate}
        if not fits:
            refused += 1
            with pytest.raises(ValueError, match="must divide"):
                Topology.resolve(world, **given)
            continue
        accepted += 1
        t = Topology.resolve(world, **given)
        assert t.dp_size * t.cp_size == t.world_size == t.mp_replicate_size * t.mp_shard_size
        assert t.edp_size * t.efsdp_size * t.ep_size == t.dp_size
        assert t.expert_shard_size == t.efsdp_size * t.cp_size
    assert accepted > 50
    assert refused > 50


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"ep_size": 3}, ("ep_size (3)", "dp_size (8)")),
        ({"ep_size": 8, "cp_size": 2}, ("ep_size (8)", "dp_size (4)")),
        ({"cp_size": 3}, ("cp_size (3)", "world_size (8)")),
        ({"ep_size": 2, "efsdp_size": 3}, ("efsdp_size (3)", "(4)")),
        ({"dp_size": 4}, ("dp_size (4)", "world_size (8)", "8")),
        ({"mp_replicate_size": 3}, ("mp_replicate_size (3)", "world_size (8)")),
        ({"mp_replicate_size": 2, "mp_shard_size": 8}, ("mp_replicate_size (2)", "mp_shard_size (8)", "16")),
        ({"ep_size": 0}, ("ep_size", "positive", "0")),
        ({"ep_size": -1}, ("ep_size", "positive", "-1")),
        ({"ep_size": True}, ("ep_size", "positive", "True")),
        ({"ep_size": 2.0}, ("ep_size", "positive", "2.0")),
        ({"cp_size": "2"}, ("cp_size", "positive", "'2'")),
        ({"ranks_per_node": 3}, ("ranks_per_node (3)", "world_size (8)", "one node")),
        ({"ranks_per_node": 16}, ("ranks_per_node (16)", "world_size (8)")),
        ({"ranks_per_node": 0}, ("ranks_per_node", "positive", "0")),
        ({"efsdp_size": 0}, ("efsdp_size", "positive", "0")),
        ({"dp_size": 0}, ("dp_size", "positive", "0")),
    ],
)
def test_errors_name_field_value_rule(given: dict, parts: tuple[str, ...]):
    with pytest.raises(ValueError, match=".") as caught:
        Topology.resolve(8, **given)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("world", "given", "nodes", "unevenly"),
    [
        (16, {"ep_size": 16, "ranks_per_node": 8}, 2, False),
        (32, {"ep_size": 16, "ranks_per_node": 4}, 4, False),
        (16, {"ep_size": 16, "ranks_per_node": 2}, 8, False),
        (16, {"ep_size": 8, "cp_size": 2, "ranks_per_node": 8}, 2, False),
        (16, {"ep_size": 16}, 1, False),  # one node
        (32, {"ep_size": 8, "ranks_per_node": 8}, 1, False),  # each group inside a node
        (32, {"ep_size": 4, "ranks_per_node": 8}, 1, False),
        (16, {"ep_size": 16, "ranks_per_node": 1}, 1, False),  # a rank a node: two stages would be one
        (16, {"ep_size": 4, "cp_size": 4, "ranks_per_node": 2}, 1, False),  # as above
        (16, {"ep_size": 2, "cp_size": 2, "ranks_per_node": 2}, 1, False),
        (24, {"ep_size": 12, "ranks_per_node": 8}, 1, True),
        (24, {"ep_size": 12, "ranks_per_node": 4}, 3, False),
        (24, {"ep_size": 4, "ranks_per_node": 6}, 1, True),  # the second group crosses
        (24, {"ep_size": 2, "cp_size": 4, "ranks_per_node": 6}, 1, True),
        (24, {"ep_size": 1, "cp_size": 4, "ranks_per_node": 6}, 1, False),
    ],
)
def test_nodes_of_an_ep_group(world: int, given: dict, nodes: int, unevenly: bool):
    sizes = Topology.resolve(world, **given)
    assert (sizes.ep_nodes, sizes.splits_ep_unevenly) == (nodes, unevenly)
    # Counted on the ranks of every group.
    span = sizes.ep_size * sizes.cp_size
    groups = [range(b + c, b + span, sizes.cp_size) for b in range(0, world, span) for c in range(sizes.cp_size)]
    kinds = {tuple(Counter(rank // sizes.ranks_per_node for rank in group).values()) for group in groups}
    assert (len(kinds) > 1 or len(set(*kinds)) > 1) == unevenly
    if nodes > 1:
        assert kinds == {(sizes.ep_size // nodes,) * nodes}


@pytest.fixture
def fake_world():
    """``fake_world(rank, size)``: a process group whose collectives do nothing, to build any rank's meshes."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        parallel_state._STATE = None
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
    parallel_state._STATE = None


def test_rank_layout_of_the_docstring(fake_world):
    """Eight ranks, cp 2, ep 2, efsdp 2: cp innermost, then ep, then efsdp."""
    expected = {"expert_cp": [0, 1] * 4, "ep": [0, 0, 1, 1] * 2, "efsdp": [0, 0, 0, 0, 1, 1, 1, 1], "edp": [0] * 8}
    for rank in range(8):
        fake_world(rank, 8)
        state = FSDPTurboParallelState.initialize(Topology.resolve(8, cp_size=2, ep_size=2), "cpu")
        assert state.expert_mesh.mesh_dim_names == EXPERT_AXES
        where = dict(zip(EXPERT_AXES, state.expert_mesh.get_coordinate(), strict=True))
        assert where == {axis: ranks[rank] for axis, ranks in expected.items()}


def test_meshes_of_sixteen_ranks(fake_world):
    """World 16, ep 8: experts on eight neighbours, each pair eight apart shares their parameters."""
    fake_world(3, 16)
    state = FSDPTurboParallelState.initialize(Topology.resolve(16, ep_size=8), "cpu")
    assert state.ep_mesh.mesh.tolist() == list(range(8))
    assert state.expert_fsdp_mesh.mesh.tolist() == [3, 11]
    assert state.dense_mesh.mesh.tolist() == list(range(16))
    assert state.dense_mesh.mesh_dim_names == ("fsdp",)
    assert state.loader_mesh.mesh_dim_names == ("dp_shard", "cp")
    assert tuple(state.loader_mesh.shape) == (16, 1)


@pytest.mark.skipif(
    not compat.has_mesh_concatenate(), reason="edp_size with cp_size needs torch 2.10 (compat.py refuses it)"
)
def test_meshes_with_every_axis(fake_world):
    """World 16, cp 2, ep 2, efsdp 2, edp 2, two replicas: shard axis over efsdp and cp, replicate axis before it."""
    fake_world(5, 16)
    sizes = Topology.resolve(16, cp_size=2, ep_size=2, efsdp_size=2, mp_replicate_size=2)
    state = FSDPTurboParallelState.initialize(sizes, "cpu")
    # rank 5 = edp 0, efsdp 1, ep 0, expert_cp 1
    assert state.ep_mesh.mesh.tolist() == [5, 7]
    assert state.expert_fsdp_mesh.ndim == 2
    assert state.expert_fsdp_mesh.mesh.tolist() == [[0, 1, 4, 5], [8, 9, 12, 13]]
    assert state.dense_mesh.mesh_dim_names == ("replicate", "fsdp")
    assert state.dense_mesh.mesh.tolist() == [list(range(8)), list(range(8, 16))]
    assert state.cp_mesh.mesh.tolist() == [4, 5]


def test_groups_over_nodes(fake_world):
    """Sixteen ranks, cp 2, ep 8 on nodes of 8: rank 11 = node 1, place 1, expert_cp 1 of its ep group."""
    import torch.distributed as dist

    fake_world(11, 16)
    state = FSDPTurboParallelState.initialize(Topology.resolve(16, cp_size=2, ep_size=8, ranks_per_node=8), "cpu")
    assert state.ep_mesh.mesh.tolist() == [1, 3, 5, 7, 9, 11, 13, 15]
    assert (state.ep_nodes.num_nodes, state.ep_nodes.ranks_per_node) == (2, 4)
    assert dist.get_process_group_ranks(state.ep_nodes.inside) == [9, 11, 13, 15]
    assert dist.get_process_group_ranks(state.ep_nodes.across) == [3, 11]
    fake_world(11, 16)
    assert FSDPTurboParallelState.initialize(Topology.resolve(16, ep_size=8, ranks_per_node=8), "cpu").ep_nodes is None


def test_every_rank_makes_groups_in_one_order_where_the_backend_needs_it(fake_world, monkeypatch):
    """NCCL bound to its device: each rank makes all groups of all ranks."""
    import torch.distributed as dist

    right, orders = dist.new_group, []
    for rank in range(8):
        fake_world(rank, 8)
        made: list[list[int]] = []
        with monkeypatch.context() as patch:
            patch.setattr(dist, "new_group", lambda ranks, made=made, **kw: made.append(ranks) or right(ranks, **kw))
            groups = make_node_groups([[0, 1, 2, 3], [4, 5, 6, 7]], 2, all_ranks_take_part=True)
        orders.append(made)
        assert rank in dist.get_process_group_ranks(groups.inside)
        assert rank in dist.get_process_group_ranks(groups.across)
    assert orders[0] == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 2], [1, 3], [4, 6], [5, 7]]
    assert all(made == orders[0] for made in orders)


def test_initialize_again(fake_world):
    fake_world(0, 4)
    with pytest.raises(RuntimeError, match="No FSDPTurbo parallel state yet"):
        get_fsdpturbo_parallel_state()
    state = FSDPTurboParallelState.initialize(Topology.resolve(4, ep_size=2), "cpu")
    assert FSDPTurboParallelState.initialize(Topology.resolve(4, ep_size=2), "cpu") is state
    assert get_fsdpturbo_parallel_state() is state
    with pytest.raises(RuntimeError, match=r"ep_size=2.*ep_size=4"):
        FSDPTurboParallelState.initialize(Topology.resolve(4, ep_size=4), "cpu")
