"""The two process groups over which a rank exchanges in two stages: its node's, and those of its place in each node.

Eight ranks of one ep group on two nodes; a rank's place is its number among the group's ranks on its node:

    rank      0 1 2 3 | 4 5 6 7
    place     0 1 2 3 | 0 1 2 3
    inside    0 1 2 3 | 4 5 6 7      one group a node
    across    {0 4} {1 5} {2 6} {3 7}    one group a place
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class NodeGroups:
    """What a rank sees of the nodes of its ep group.

    Attributes:
        across: this rank and those of its place on the other nodes, by node.
        inside: the ep group's ranks on this node, by place.
        num_nodes: nodes of the ep group, 2 or more.
        ranks_per_node: the ep group's ranks on each, 2 or more. Rank ``node * ranks_per_node + place`` of the ep group
            is the one with that place on that node.
    """

    across: ProcessGroup
    inside: ProcessGroup
    num_nodes: int
    ranks_per_node: int


def nodes_and_places(ep_ranks: Sequence[int], num_nodes: int) -> tuple[list[list[int]], list[list[int]]]:
    """Ranks of one ep group by node and by place: ``(one list a node, one list a place)``."""
    near = len(ep_ranks) // num_nodes
    by_node = [list(ep_ranks[start : start + near]) for start in range(0, len(ep_ranks), near)]
    return by_node, [list(ep_ranks[place::near]) for place in range(near)]


def make_node_groups(ep_groups: Sequence[Sequence[int]], num_nodes: int, *, all_ranks_take_part: bool) -> NodeGroups:
    """This rank's two groups. Every rank of the world calls it, in the same order among calls that make groups.

    Args:
        ep_groups: ranks of every ep group of the world, each sorted so that a node's ranks are neighbours.
        num_nodes: nodes of an ep group; divides its size.
        all_ranks_take_part: whether the backend needs every rank of the world to take part in making each group. If
            not, a rank makes its own two only.
    """
    import torch.distributed as dist

    rank, mine = dist.get_rank(), {}
    for by in range(2):  # all ranks make their node's group first, then their place's
        for ranks in (ranks for ep_ranks in ep_groups for ranks in nodes_and_places(ep_ranks, num_nodes)[by]):
            if all_ranks_take_part or rank in ranks:
                desc = ("ep_inside_node", "ep_across_nodes")[by]
                group = dist.new_group(ranks, use_local_synchronization=not all_ranks_take_part, group_desc=desc)
                if rank in ranks:
                    mine[by] = group
    return NodeGroups(mine[1], mine[0], num_nodes, len(ep_groups[0]) // num_nodes)
