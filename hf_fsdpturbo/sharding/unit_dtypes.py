"""Which parameters of a unit share one FSDP group: FSDP wants one stored and one compute dtype for all of a group.

a decoder layer (or the root), and what nobody manages yet of it
  main     most of it, computes in the unit's dtype           -> fully_shard(layer)
  small    norms, biases, sinks, scalars of another dtype     -> whole on every rank, gradients averaged by us
  large    a float32 router beside bf16 matrices              -> fully_shard(block in it), the rest of it ignored
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

SMALL = 2**16
"""Elements; what is not larger is not worth a collective of its own: 256 KiB in float32 on every rank."""


@dataclass(frozen=True)
class Kind:
    """What parameters of one FSDP group have in common. FSDP reduces trainable ones only: frozen ones may differ."""

    trainable: bool
    stored: torch.dtype
    in_float32: bool


@dataclass(frozen=True)
class Group:
    """Large parameters with a unit of their own: ``block`` is the module whose forward spans every use of them."""

    block: nn.Module
    parameters: frozenset[nn.Parameter]
    in_float32: bool


@dataclass
class Split:
    """Parameters of one unit.

    Attributes:
        main: managed by the unit itself, in float32 if ``in_float32``.
        small: kept whole on every rank.
        large: further units inside this one; no two have the same block.
    """

    main: set[nn.Parameter] = field(default_factory=set)
    in_float32: bool = False
    small: set[nn.Parameter] = field(default_factory=set)
    large: list[Group] = field(default_factory=list)


def split_unit(
    unit: nn.Module, free: Iterable[nn.Parameter], float32: set[nn.Parameter], head: nn.Parameter | None = None
) -> Split:
    """Divide what is free of a unit's parameters.

    Args:
        unit: decoder layer or root.
        free: its parameters that nobody manages yet, in model order.
        float32: those that compute in float32 in a bf16 run.
        head: the LM head's weight, which must be in the root's own group (Note [What stays in the root unit]).
    """
    kinds: dict[Kind, list[nn.Parameter]] = defaultdict(list)
    for parameter in dict.fromkeys(free):
        kinds[Kind(parameter.requires_grad, parameter.dtype, parameter in float32)].append(parameter)
    split = Split()
    if not kinds:
        return split

    def weight(kind: Kind) -> tuple[bool, int]:
        members = kinds[kind]
        return any(p is head for p in members), sum(p.numel() for p in members)

    split.in_float32 = max(kinds, key=weight).in_float32
    alike = [kind for kind in kinds if kind.in_float32 is split.in_float32]
    chosen = {max((k for k in alike if k.trainable is t), key=weight) for t in {k.trainable for k in alike}}
    for kind, members in kinds.items():
        if kind in chosen:
            split.main.update(p for p in members if p.ndim)
            split.small.update(p for p in members if not p.ndim)  # FSDP takes no scalars
            continue
        split.small.update(p for p in members if p.numel() <= SMALL)
        _place(unit, {p for p in members if p.numel() > SMALL}, kind.in_float32, split)
    return split


def _place(unit: nn.Module, members: set[nn.Parameter], in_float32: bool, split: Split) -> None:
    """Find the modules whose forwards span every use of large parameters; what has none stays whole.

    So does what two of them hold: an embedding beside the head that PEFT keeps of it when it trains a copy.
    """
    blocks = list(blocks_inside(unit))
    holders = Counter(p for block in blocks for p in set(block.parameters()))
    for block in blocks:
        inside = frozenset(p for p in block.parameters() if p in members and holders[p] == 1)
        if not inside:
            continue
        members = members - inside
        if isinstance(block, FSDPModule) or any(group.block is block for group in split.large):
            _place(block, set(inside), in_float32, split)
        else:
            split.large.append(Group(block, inside, in_float32))
    split.small.update(members)


def blocks_inside(unit: nn.Module) -> Iterator[nn.Module]:
    """Children that are called by the unit's code, through lists and dicts of modules.

    A child as a whole, since its code may read the weight of a module inside it (convolutions, routers).
    """
    for child in unit.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from blocks_inside(child)
        else:
            yield child
