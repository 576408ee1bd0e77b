"""Layouts of a proof: their names, the user's one on a few ranks, and another one to resume at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hf_fsdpturbo.topology import Topology, positive

MOST_RANKS = 16
AXES = ("ep", "efsdp", "edp", "cp", "hsdp")


@dataclass(frozen=True)
class Layout:
    """Sizes that multiply to the ranks: ``world = ep * efsdp * edp * cp``; ``hsdp`` (mp_replicate_size) divides it."""

    ep: int = 1
    efsdp: int = 1
    edp: int = 1
    cp: int = 1
    hsdp: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.cp

    @property
    def dp(self) -> int:
        """Ranks with batches of their own."""
        return self.ep * self.efsdp * self.edp

    @property
    def name(self) -> str:
        """As ``--layout`` takes it; ``one`` for one rank."""
        return "_".join(f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "one"

    @property
    def fields(self) -> dict[str, int]:
        """Topology's fields; ``efsdp_size`` belongs into ``dist_config``."""
        return {
            "ep_size": self.ep,
            "efsdp_size": self.efsdp,
            "cp_size": self.cp,
            "mp_replicate_size": self.hsdp,
        }

    def check(self) -> Layout:
        """Itself; raise ValueError where the sizes do not fit together or are more than :data:`MOST_RANKS` ranks."""
        if self.world > MOST_RANKS:
            raise ValueError(f"{self.name} is {self.world} ranks, but at most {MOST_RANKS} are started. Shrink it.")
        Topology.resolve(self.world, **self.fields)
        return self


def read_layout(text: str) -> Layout:
    """``ep2_efsdp2``: sizes of axes with ``_`` between; those left out are 1.

    Raises:
        ValueError: another word, an axis twice, a size that does not fit.
    """
    sizes: dict[str, int] = {}
    for part in text.split("_"):
        match = re.fullmatch(rf"({'|'.join(AXES)})([1-9]\d?)", part)
        if match is None or match[1] in sizes:
            raise ValueError(
                f"{text!r} is no layout: write {', '.join(f'{axis}N' for axis in AXES)}, each at most once, with _ "
                "between (ep2, ep2_efsdp2, ep2_cp2, ep2_efsdp2_hsdp2). hsdp divides the ranks, the others multiply to "
                "them."
            )
        sizes[match[1]] = int(match[2])
    return Layout(**sizes).check()


def users_layout(world: int | None, sizes: Mapping[str, int | None]) -> Layout:
    """The layout of the user's run.

    Args:
        world: processes, None where nothing says: as many as the sizes need.
        sizes: those given of ``ep_size``, ``efsdp_size``, ``cp_size``, ``mp_replicate_size``.

    Raises:
        ValueError: they do not fit.
    """
    given = {name: positive(name, size) for name, size in sizes.items() if size is not None}
    needed = given.get("ep_size", 1) * given.get("efsdp_size", 1) * given.get("cp_size", 1)
    found = Topology.resolve(max(needed, given.get("mp_replicate_size", 1)) if world is None else world, **given)
    return Layout(found.ep_size, found.efsdp_size, found.edp_size, found.cp_size, found.mp_replicate_size)


def on_two_ranks(users: Layout) -> Layout:
    """The axis of two ranks that says most about the user's layout; ep where it has no other."""
    axis = next((axis for axis in ("ep", "cp", "efsdp", "edp") if getattr(users, axis) > 1), "ep")
    return Layout(**{axis: 2})


def on_few_ranks(users: Layout, most: int = MOST_RANKS) -> Layout:
    """The user's layout, its largest axes halved (or set to 2 where they are odd) until ``most`` ranks do."""
    found = users
    while found.world > most:
        axis = max(AXES[:4], key=lambda one: (getattr(found, one), one == "ep"))
        size = getattr(found, axis)
        found = replace(found, **{axis: size // 2 if size % 2 == 0 else 2})
    if found.world % found.hsdp:
        found = replace(found, hsdp=2 if found.world % 2 == 0 else 1)
    return found


def another(layout: Layout) -> Layout:
    """Where a checkpoint of ``layout`` is resumed: other axes, the same batches (``dp`` stays).

    Experts in fewer parts fit any number of them, so ep gives its ranks to efsdp; what has no ep gives efsdp to edp,
    and cp alone resumes without it.
    """
    if layout.ep > 1:
        return replace(layout, ep=1, efsdp=layout.ep * layout.efsdp, hsdp=1)
    if layout.efsdp > 1:
        return replace(layout, efsdp=1, edp=layout.efsdp * layout.edp, hsdp=1)
    if layout.edp > 1:
        return replace(layout, edp=1, efsdp=layout.edp, hsdp=1)
    return Layout()
