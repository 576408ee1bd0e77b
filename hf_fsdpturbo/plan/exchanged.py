"""Bytes that a rank sends in a micro-step: rows of its tokens, FSDP's weights and gradients; in its node and beyond.

Routing is uniform: K distinct experts of E, so that a part 1/n of the experts is missed by a token with probability
C(E - E/n, K) / C(E, K). ``docs/scaling.md`` derives the formulas, ``benchmarks/dispatch_bytes.py`` counts the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hf_fsdpturbo.dispatch.packed_rows import PackedLayout
from hf_fsdpturbo.parallelize.kept_activations import KEEPING_DISPATCHERS, choices
from hf_fsdpturbo.plan.planned_run import FROZEN, PlannedRun
from hf_fsdpturbo.plan.shape import ModelShape

GATHERED_TWICE = 2 * 2 + 4  # bytes a parameter: bf16 for forward and backward, a float32 gradient reduced
INSIDE, BETWEEN = 300e9, 40e9  # bytes a second and rank that links inside a node and between nodes are taken for


@dataclass(frozen=True)
class Sent:
    """Bytes a rank sends in a micro-step, to ranks of its node and to other nodes."""

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.inside + other.inside, self.between + other.between)

    @property
    def seconds(self) -> float:
        """What it takes at ``INSIDE`` and ``BETWEEN``, nothing hidden: to rank layouts, not to predict time."""
        return self.inside / INSIDE + self.between / BETWEEN


def reached(experts: int, top_k: int, parts: int) -> float:
    """Probability that a token goes to one of ``parts`` equal parts of the experts."""
    return 1 - math.comb(experts - experts // parts, top_k) / math.comb(experts, top_k)


def rows_sent(experts: int, top_k: int, run: PlannedRun) -> Sent:
    """Rows that a token of this rank sends in one layer and direction."""
    sizes = run.topology
    ranks = sizes.ep_size
    if ranks == 1:
        return Sent()
    near = max(1, min(ranks, sizes.ranks_per_node // sizes.cp_size))  # ranks of the ep group on a node
    if run.dispatcher not in KEEPING_DISPATCHERS:
        return Sent(top_k * (near - 1) / ranks, top_k * (ranks - near) / ranks)
    each = reached(experts, top_k, ranks)
    if run.dispatcher == "fused" and sizes.ep_nodes > 1:
        nodes = sizes.ep_nodes
        return Sent(nodes * (near - 1) * each, (nodes - 1) * reached(experts, top_k, nodes))
    return Sent((near - 1) * each, (ranks - near) * each)


def row_bytes_both_ways(hidden: int, top_k: int, run: PlannedRun) -> int:
    """Bytes of one row out and back, forward and backward; what ``full`` recompute sends again is one way out."""
    plain = hidden * run.compute_bytes
    packed = plain
    if run.dispatcher in KEEPING_DISPATCHERS:
        packed = PackedLayout(hidden, top_k, torch.bfloat16).width * run.compute_bytes
    return 2 * (plain + packed) + (packed if run.recompute == "full" else 0)


def _sharded(numel: float, shard: int, on_a_node: int, run: PlannedRun, trained: bool, packed: float = 0.0) -> Sent:
    """Weights of ``numel`` over ``shard`` ranks, ``on_a_node`` of them in each node; ``packed`` bytes an element."""
    if shard == 1:
        return Sent()
    nodes = max(1, shard // on_a_node)
    volume = numel * (GATHERED_TWICE if trained else 2 * (packed or run.compute_bytes))
    between = volume * (1 - 1 / nodes) / on_a_node
    return Sent(volume * (1 - 1 / shard) - between, between)


def _repeated(numel: float, replicas: int, across_nodes: bool) -> Sent:
    """An all-reduce of float32 gradients."""
    volume = 8 * numel * (1 - 1 / replicas)
    return Sent(0.0, volume) if across_nodes else Sent(volume, 0.0)


def sent(shape: ModelShape, run: PlannedRun) -> Sent:
    """Of a rank in one micro-step, all layers."""
    sizes, top_k, hidden = run.topology, choices(shape.config), shape.config.hidden_size
    near = sizes.ranks_per_node
    total = Sent()
    for unit in shape.layers:
        for experts in unit.experts:
            rows = rows_sent(experts.num_experts, top_k, run)
            each = run.tokens * row_bytes_both_ways(hidden, top_k, run)
            total += Sent(rows.inside * each, rows.between * each)
    dense_near = min(sizes.mp_shard_size, near)
    total += _sharded(shape.dense_numel, sizes.mp_shard_size, dense_near, run, not run.lora_r)
    if not run.lora_r:
        many = sizes.mp_shard_size >= near and sizes.world_size > near
        total += _repeated(shape.dense_numel / sizes.mp_shard_size, sizes.mp_replicate_size, many)
    local, shard = shape.expert_numel / sizes.ep_size, sizes.expert_shard_size
    expert_near = max(1, min(shard, max(sizes.cp_size, near // sizes.ep_size)))
    total += _sharded(local, shard, expert_near, run, not run.lora_r, FROZEN[run.frozen])
    if not run.lora_r:
        many = sizes.ep_size * shard >= near and sizes.world_size > near
        total += _repeated(local / shard, sizes.edp_size, many)
    return total


def even_at(shape: ModelShape, run: PlannedRun) -> float | None:
    """Tokens a device and micro-step at which EP over nodes sends as much between nodes as EFSDP over them would.

    None where experts exchange inside a node, or the model has none. ``docs/scaling.md``, *Where EP over nodes does
    not pay*.
    """
    sizes, top_k = run.topology, choices(shape.config)
    near = sizes.ranks_per_node // sizes.cp_size
    layer = next((experts for unit in shape.layers for experts in unit.experts), None)
    if layer is None or near < 1 or sizes.ep_size <= near:
        return None
    nodes = sizes.ep_size // near
    bytes_a_token = rows_sent(layer.num_experts, top_k, run).between * row_bytes_both_ways(
        shape.config.hidden_size, top_k, run
    )
    return layer.numel / near * GATHERED_TWICE * (1 - 1 / nodes) / bytes_a_token if bytes_a_token else None
