"""What a run takes for a node, and what it says of nodes at the start."""

from __future__ import annotations

import pytest

from hf_fsdpturbo.parallelize.order import nodes_in_words
from hf_fsdpturbo.topology import Topology
from hf_fsdpturbo.trainer import set_up


def resolved(monkeypatch, local_world_sizes: list[int], given: list[int | None], **sizes: int) -> Topology:
    """What rank 0 takes, where each rank's launcher and user said this."""
    world = len(local_world_sizes)
    said = list(zip(given, local_world_sizes, strict=True))
    monkeypatch.setattr(set_up.launch_config, "local_world_size", lambda: local_world_sizes[0])
    monkeypatch.setattr(set_up, "everyone", lambda value: said if value == said[0] else pytest.fail(str(value)))
    monkeypatch.setattr(set_up, "rank", lambda: 0)
    return set_up.with_nodes(Topology.resolve(world, ranks_per_node=given[0], **sizes), given[0])


def test_the_launcher_s_nodes(monkeypatch, caplog):
    assert resolved(monkeypatch, [4] * 8, [None] * 8, ep_size=8).ep_nodes == 2
    assert caplog.text == ""


def test_the_user_s_nodes(monkeypatch):
    assert resolved(monkeypatch, [8] * 8, [2] * 8, ep_size=8).ep_nodes == 4
    assert resolved(monkeypatch, [2] * 8, [8] * 8, ep_size=8).ep_nodes == 1


@pytest.mark.parametrize("local", [[8] * 8 + [4] * 4, [4] * 4 + [8] * 8, [5] * 12])
def test_nodes_of_different_sizes_are_one_node(monkeypatch, caplog, local):
    """Some ranks see 4, which divides the world: taken for itself it would make groups that others do not make."""
    assert resolved(monkeypatch, local, [None] * 12, ep_size=12).ranks_per_node == 12
    assert "nodes of different sizes" in caplog.text
    caplog.clear()
    resolved(monkeypatch, local, [None] * 12)
    assert caplog.text == "", "nothing is exchanged"


def test_a_setting_that_differs_between_ranks_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"ranks_per_node must be the same on every rank.*\[4, 4, None, None\]"):
        resolved(monkeypatch, [4] * 4, [4, 4, None, None])


def test_one_process_asks_nobody(monkeypatch):
    monkeypatch.setattr(set_up, "everyone", lambda value: pytest.fail("asked"))
    assert set_up.with_nodes(Topology.resolve(1), None).ranks_per_node == 1


@pytest.mark.parametrize(
    ("world", "sizes", "said"),
    [
        (16, {"ep_size": 16, "ranks_per_node": 8}, ["over 2 nodes of 8 ranks"]),
        (16, {"ep_size": 8, "ranks_per_node": 8}, []),
        (24, {"ep_size": 12, "ranks_per_node": 8}, ["does not split evenly", "Set ranks_per_node=4 for two"]),
        (18, {"ep_size": 9, "ranks_per_node": 2}, ["does not split evenly"]),
    ],
)
def test_the_summary_says_how_many_stages(world: int, sizes: dict[str, int], said: list[str]):
    topology = Topology.resolve(world, **sizes)
    text = " ".join(nodes_in_words(topology, "fused"))
    assert bool(text) == bool(said)
    for part in said:
        assert part in text
    assert ("for two" in text) == any("for two" in part for part in said)
    assert nodes_in_words(topology, "eager") == nodes_in_words(topology, "domino") == []
