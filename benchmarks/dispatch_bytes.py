"""Bytes that a token sends to other ranks, by counting: eager (a row a pair) and fused (a row a rank), ep 2 to 64.

Counted on the rows that the dispatchers' own code plans for random routing (K distinct experts of E), one direction
of the
forward; the way back and the backward send the same rows without the slots. No process group is needed: each rank's
count is its own.
"""

import argparse

import torch

from hf_fsdpturbo.dispatch.packed_rows import PackedLayout
from hf_fsdpturbo.ops.table import get_ops


def count(tokens, top_k, experts, hidden, ep_size, skew):
    """``(eager, fused)`` bytes a token leaving its rank; rank 0 of the group sends, bf16."""
    generator = torch.Generator().manual_seed(ep_size)
    logits = torch.randn(tokens, experts, generator=generator) + torch.randn(experts, generator=generator) * skew
    index = logits.topk(top_k, dim=-1).indices
    totals = get_ops("cpu").count_routing(index, experts, ep_size).totals_X
    local = experts // ep_size
    pairs_away = int(totals[local:experts].sum())
    rows_away = int(totals[experts + 1 :].sum())
    layout = PackedLayout(hidden, top_k, torch.bfloat16)
    return pairs_away * hidden * 2 / tokens, rows_away * layout.width * 2 / tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--skew", type=float, default=0.5, help="spread of the experts' popularity")
    a = parser.parse_args()
    print(f"K = {a.top_k} of E = {a.experts}, D = {a.hidden}, bf16; KiB a token sent to other ranks, dispatch only")
    print("| ep | eager | fused | ratio |\n|---|---|---|---|")
    for ep_size in (2, 4, 8, 16, 32, 64):
        if a.experts % ep_size == 0:
            eager, fused = count(a.tokens, a.top_k, a.experts, a.hidden, ep_size, a.skew)
            print(f"| {ep_size} | {eager / 1024:.1f} | {fused / 1024:.1f} | {fused / eager:.2f} |")


if __name__ == "__main__":
    main()
