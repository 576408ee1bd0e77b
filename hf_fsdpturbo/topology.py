"""Sizes of a run and their rules: plain arithmetic, checked on every rank before anything is built."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hf_fsdpturbo.bounded import cut


def positive(field: str, value: Any) -> int:
    """The value; raise ValueError unless it is an integer of at least 1 (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field} must be a positive integer, but it is {cut(value)}. Set {field} to 1 or more.")
    return value


LARGEST = 10**8
"""Of sizes, and of seconds: three years."""


def at_most(field: str, value: Any) -> None:
    """Raise ValueError for a size, or seconds, that no run has; a number is expected."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
        raise ValueError(f"{field} must be more than 0 and at most {LARGEST}, but it is {cut(value)}. Correct it.")


def _divides(field: str, value: int, of: str, total: int, fix: str) -> int:
    if total % value:
        raise ValueError(
            f"{field} ({value}) must divide {of} ({total}), but {total} % {value} = {total % value}. {fix}"
        )
    return total // value


@dataclass(frozen=True)
class Topology:
    """Sizes of one run: ``dp * cp == world``, ``edp * efsdp * ep == dp``, ``mp_replicate * mp_shard == world``.

    ``ranks_per_node`` is no size of the layout: it says which ranks are near each other.
    """

    world_size: int
    dp_size: int
    cp_size: int
    ep_size: int
    efsdp_size: int
    edp_size: int
    mp_replicate_size: int
    mp_shard_size: int
    ranks_per_node: int

    @classmethod
    def resolve(
        cls,
        world_size: int,
        *,
        dp_size: int | None = None,
        cp_size: int = 1,
        ep_size: int = 1,
        efsdp_size: int | None = None,
        mp_replicate_size: int = 1,
        mp_shard_size: int | None = None,
        ranks_per_node: int | None = None,
    ) -> Topology:
        """Fill in the sizes that were left open and check all of them; ``ranks_per_node`` None is one node for all.

        Raises:
            ValueError: a size is not a positive integer or does not divide what it has to divide; the message names
                the field, its value, the rule and the fix.
        """
        world = positive("world_size", world_size)
        cp = positive("cp_size", cp_size)
        dp = _divides("cp_size", cp, "world_size", world, "Change cp_size or the number of processes.")
        if dp_size is not None and positive("dp_size", dp_size) != dp:
            raise ValueError(
                f"dp_size ({dp_size}) * cp_size ({cp}) must equal world_size ({world}), but it is {dp_size * cp}. "
                f"Leave dp_size out, or set it to {dp}."
            )
        ep = positive("ep_size", ep_size)
        per_ep = _divides("ep_size", ep, "dp_size", dp, "Choose an ep_size that divides world_size / cp_size.")
        efsdp = per_ep if efsdp_size is None else positive("efsdp_size", efsdp_size)
        edp = _divides("efsdp_size", efsdp, "dp_size / ep_size", per_ep, f"Leave efsdp_size out to get {per_ep}.")
        replicate = positive("mp_replicate_size", mp_replicate_size)
        shard = _divides("mp_replicate_size", replicate, "world_size", world, "Change mp_replicate_size.")
        if mp_shard_size is not None and positive("mp_shard_size", mp_shard_size) != shard:
            raise ValueError(
                f"mp_replicate_size ({replicate}) * mp_shard_size ({mp_shard_size}) must equal world_size ({world}), "
                f"but it is {replicate * mp_shard_size}. Leave mp_shard_size out, or set it to {shard}."
            )
        near = world if ranks_per_node is None else positive("ranks_per_node", ranks_per_node)
        _divides("ranks_per_node", near, "world_size", world, f"Leave it out, or set it to {world} for one node.")
        return cls(world, dp, cp, ep, efsdp, edp, replicate, shard, near)

    @property
    def expert_shape(self) -> tuple[int, int, int, int]:
        """Shape of the expert parent mesh, axes ``(edp, efsdp, ep, expert_cp)``."""
        return self.edp_size, self.efsdp_size, self.ep_size, self.cp_size

    @property
    def expert_shard_size(self) -> int:
        """Ranks that share one expert's parameters: ``efsdp_size * cp_size``."""
        return self.efsdp_size * self.cp_size

    @property
    def ep_nodes(self) -> int:
        """Nodes over which experts exchange in two stages; 1 where they exchange in one.

        An ep group is every ``cp_size``-th rank of ``ep_size * cp_size`` neighbours. Two stages need several nodes
        with as many of its ranks on each, and more than one.
        """
        span, near = self.ep_size * self.cp_size, self.ranks_per_node
        splits_evenly = span % near == 0 and near % self.cp_size == 0 and near > self.cp_size
        return span // near if splits_evenly else 1

    @property
    def splits_ep_unevenly(self) -> bool:
        """Whether nodes cut ep groups into parts of different sizes, which two stages cannot take."""
        span, near = self.ep_size * self.cp_size, self.ranks_per_node
        if self.ep_size == 1 or near % span == 0 or near <= self.cp_size:  # the last: no two of its ranks share a node
            return False
        return self.ep_nodes == 1

    def to_dict(self) -> dict[str, int]:
        """Plain integers, for logs and ``topology.json``: the sizes of the layout."""
        return {name: size for name, size in asdict(self).items() if name != "ranks_per_node"}
