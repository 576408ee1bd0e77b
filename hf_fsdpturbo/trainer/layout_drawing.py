"""A layout drawn in four lines: which ranks share the experts, one expert's weights, a sample, and all else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hf_fsdpturbo.topology import Topology

_SHOWN = 3  # groups; and ranks of one that do not follow each other


def drawn(sizes: Topology, num_experts: int) -> list[str]:
    """Four lines; ranks that share something stand together, ``0-7 | 8-15``.

    Args:
        sizes: of the run.
        num_experts: of a layer; 0 for a dense model.
    """
    shape = sizes.expert_shape
    parts, shards = sizes.expert_shard_size, sizes.mp_shard_size
    rows: list[tuple[str, str, list[list[int]]]] = []
    if not num_experts:
        rows.append(("experts", "none: a dense model", []))
    if num_experts:
        own = num_experts // sizes.ep_size
        where = f"{own} of {num_experts} on a rank" if sizes.ep_size > 1 else f"all {num_experts} on a rank"
        rows.append(("experts", f"{where} (ep {sizes.ep_size})", _groups(shape, (2,))))
    copies = f", {sizes.edp_size} copies (edp)" if sizes.edp_size > 1 else ""
    how = f"cut in {parts} (efsdp {sizes.efsdp_size}{f' x cp {sizes.cp_size}' if sizes.cp_size > 1 else ''})"
    rows.append(("an expert", (how if parts > 1 else "whole on a rank") + copies, _groups(shape, (1, 3))))
    sample = f"cut in {sizes.cp_size} (cp), {sizes.dp_size} batches" if sizes.cp_size > 1 else "whole on a rank"
    rows.append(("a sample", sample, _groups(shape, (3,))))
    copies = f", {sizes.mp_replicate_size} copies (HSDP)" if sizes.mp_replicate_size > 1 else ""
    rest = f"cut in {shards} (FSDP){copies}" if shards > 1 else f"whole on a rank{copies}"
    rows.append(("all else", rest, _groups((sizes.mp_replicate_size, shards), (1,))))
    width = max(len(text) for _, text, _ in rows)
    return [f"  {name:<10}{text:<{width}}  {_ranks(groups)}".rstrip() for name, text, groups in rows]


def _groups(shape: Sequence[int], axes: Sequence[int]) -> list[list[int]]:
    """Ranks that differ along ``axes`` of a mesh only, group by group; the last axis runs fastest."""
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]

    def places(chosen: Sequence[int]) -> list[int]:
        steps = [range(0, shape[axis] * strides[axis], strides[axis]) for axis in chosen]
        return [sum(place) for place in itertools.product(*steps)]

    inside = places(axes)
    if len(inside) == 1:
        return []
    return [[start + rank for rank in inside] for start in places([a for a in range(len(shape)) if a not in axes])]


def _ranks(groups: list[list[int]]) -> str:
    shown = " | ".join(_range(group) for group in groups[:_SHOWN])
    return f"{shown} | ..." if len(groups) > _SHOWN else shown


def _range(ranks: list[int]) -> str:
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = " ".join(map(str, ranks[:_SHOWN]))
    return shown if len(ranks) <= _SHOWN else f"{shown} .. {ranks[-1]}"
