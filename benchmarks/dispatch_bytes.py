"""Bytes that a token sends to other ranks and to other nodes, by counting: eager, and fused in one and in two stages.

Counted on the rows that the dispatchers' own code plans for random routing (K distinct experts of E). No process group
is needed: each rank's count is its own. First table: one direction of the forward, to other ranks. Second: forward and
backward of all layers, to other nodes only, and from how many tokens on EP over nodes moves more than EFSDP over nodes
would (``docs/scaling.md`` derives it).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from benchmarks.export_planning import MODELS
from hf_fsdpturbo.dispatch.packed_rows import PackedLayout
from hf_fsdpturbo.ops.table import get_ops


@dataclass(frozen=True)
class Sizes:
    """What the counting needs to know of a released model: MoE layers, experts, top-k, hidden and ffn width."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    ffn: int



def sizes_of(config: PretrainedConfig) -> Sizes:
    """Of a released model's config; its first layers may be dense."""
    experts = getattr(config, "n_routed_experts", None) or config.num_experts
    layers = config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0)
    return Sizes(layers, experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size)


GATHERED_TWICE = 2 * 2 + 4  # bytes a parameter: bf16 gathered for forward and backward, a float32 gradient reduced


def random_index(tokens: int, top_k: int, experts: int, skew: float, seed: int) -> Tensor:
    """``[tokens, top_k]`` distinct experts; ``skew`` is the spread of their popularity."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator) + torch.randn(experts, generator=generator) * skew
    return logits.topk(top_k, dim=-1).indices


def rows_away(index_TK: Tensor, experts: int, ep_size: int, near: int, rank: int = 0) -> dict[str, int]:
    """Rows that one rank of an ep group sends to ranks that are not near it, in one direction.

    Args:
        index_TK: experts of the rank's tokens.
        experts: over the whole group.
        ep_size: ranks of the group.
        near: ranks that count as near each other: those of a node, or 1.
        rank: which rank of the group sends.
    """
    ops, node = get_ops("cpu"), rank // near
    totals = ops.count_routing(index_TK, experts, ep_size).totals_X
    pairs_M, rows_M = (part.view(ep_size // near, -1).sum(1) for part in totals.split([experts, ep_size]))
    once_M = ops.count_routing(index_TK, experts, ep_size // near).totals_X[experts:]
    return {
        name: int(counts_M.sum() - counts_M[node])
        for name, counts_M in (("eager", pairs_M), ("one stage", rows_M), ("two stages", once_M))
    }


def step_bytes(rows: dict[str, int], layout: PackedLayout) -> dict[str, int]:
    """Bytes of those rows out and back, forward and backward: eager sends tokens alone, fused its packed rows."""
    plain = layout.hidden * layout.dtype.itemsize
    packed = layout.width * layout.dtype.itemsize
    return {name: count * 2 * (plain + (plain if name == "eager" else packed)) for name, count in rows.items()}


def to_other_ranks(a: argparse.Namespace) -> None:
    """One direction of the forward, KiB a token."""
    layout = PackedLayout(a.hidden, a.top_k, torch.bfloat16)
    print(f"K = {a.top_k} of E = {a.experts}, D = {a.hidden}, bf16; KiB a token sent to other ranks, dispatch only")
    print("| ep | eager | fused | ratio |\n|---|---|---|---|")
    for ep_size in (2, 4, 8, 16, 32, 64):
        if a.experts % ep_size == 0:
            rows = rows_away(random_index(a.tokens, a.top_k, a.experts, a.skew, ep_size), a.experts, ep_size, 1)
            eager, fused = rows["eager"] * a.hidden * 2 / a.tokens, rows["one stage"] * layout.width * 2 / a.tokens
            print(f"| {ep_size} | {eager / 1024:.1f} | {fused / 1024:.1f} | {fused / eager:.2f} |")


def break_even(sizes: Sizes, bytes_a_token: float, num_nodes: int, near: int) -> float:
    """Tokens a device and micro-step at which EP over nodes moves as many bytes between nodes as EFSDP would.

    Args:
        sizes: of the model.
        bytes_a_token: that one layer's exchange sends to other nodes, forward and backward.
        num_nodes: nodes of an ep group.
        near: ranks on each.
    """
    parameters_a_rank = 3 * sizes.experts * sizes.hidden * sizes.ffn / near
    return parameters_a_rank * GATHERED_TWICE * (1 - 1 / num_nodes) / bytes_a_token


def to_other_nodes(tokens: int, near: int) -> None:
    """Forward and backward, MiB a token in all layers, uniform routing."""
    print(f"\n{near} ranks a node; MiB a token sent to other nodes, forward and backward, all layers, bf16")
    print("| model | ep | nodes | eager | one stage | two stages | even at tokens, one stage | two stages |")
    print("|---|---|---|---|---|---|---|---|")
    for model, (_, config) in MODELS.items():
        sizes = sizes_of(config)
        layout = PackedLayout(sizes.hidden, sizes.top_k, torch.bfloat16)
        for ep_size in (2 * near, 4 * near, 8 * near):
            index = random_index(tokens, sizes.top_k, sizes.experts, 0.0, ep_size)
            rows = rows_away(index, sizes.experts, ep_size, near)
            layer = {name: count / tokens for name, count in step_bytes(rows, layout).items()}
            mib = " | ".join(f"{count * sizes.layers / 2**20:.1f}" for count in layer.values())
            even = (break_even(sizes, layer[name], ep_size // near, near) for name in ("one stage", "two stages"))
            print(f"| {model} | {ep_size} | {ep_size // near} | {mib} | {' | '.join(f'{t:,.0f}' for t in even)} |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--skew", type=float, default=0.5, help="spread of the experts' popularity")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    a = parser.parse_args()
    to_other_ranks(a)
    to_other_nodes(a.tokens, a.ranks_per_node)


if __name__ == "__main__":
    main()
