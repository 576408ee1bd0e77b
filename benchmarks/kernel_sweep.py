"""Program shapes of our copy and SwiGLU kernels, tried in turn on one GPU; the first line of each table is what ships.

Bytes are counted (each input read once, each output written once), so the last column is a bandwidth to hold against a
plain copy's.
"""

import torch

from benchmarks.moe_block import median_ms
from hf_fsdpturbo.ops.table import get_ops

T, K, E, D, F = 16384, 8, 128, 2048, 768
ROWS = [(2048, 8), (2048, 4), (1024, 4), (1024, 8), (2048, 16)]
TILES = [(4, 256, 4), (8, 256, 8), (4, 256, 8), (2, 256, 2), (1, 1024, 4), (8, 128, 4), (16, 256, 8)]


def line(name, shape, ms, megabytes):
    print(f"{name:16s} {shape!s:16s} {ms:7.3f} ms {megabytes / ms / 1e3:6.2f} TB/s", flush=True)


def main():
    from hf_fsdpturbo.ops import triton_rows, triton_swiglu  # here, as get_ops does: a file that needs triton

    ops = get_ops("cuda")
    torch.manual_seed(0)
    index = torch.rand(T, E, device="cuda").topk(K, dim=-1).indices
    routing = ops.count_routing(index, E, 1)
    slots, _ = ops.slot_pairs(routing, routing.totals_X.unsqueeze(0), 0)
    x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16)
    wide, hidden, active = (torch.randn(T * K, n, device="cuda", dtype=torch.bfloat16) for n in (D, 2 * F, F))
    weights, out = torch.rand(T * K, device="cuda"), torch.empty_like(x)
    copy = torch.empty_like(wide)
    mb = 1e6
    line("plain copy", "-", median_ms(lambda: copy.copy_(wide)), 2 * wide.nbytes / mb)
    line("count + place", "-", median_ms(lambda: ops.count_routing(index, E, 1)), index.nbytes / mb)
    line("count, ep 2", "-", median_ms(lambda: ops.count_routing(index, E, 2)), index.nbytes / mb)
    for shape in ROWS:
        triton_rows._ROW_BLOCK, triton_rows._ROW_WARPS = shape
        size = (wide.nbytes + x.nbytes) / mb
        line("scatter rows", shape, median_ms(lambda: ops.scatter_rows(x, slots, wide)), size)
        line("gather sum", shape, median_ms(lambda: ops.gather_sum(wide, slots, out)), size)
    for shape in TILES:
        triton_swiglu._SWIGLU_ROWS, triton_swiglu._SWIGLU_COLUMNS, triton_swiglu._SWIGLU_WARPS = shape
        size = (hidden.nbytes + active.nbytes) / mb
        line("swiglu", shape, median_ms(lambda: ops.swiglu(hidden, weights)), size)
        line("swiglu backward", shape, median_ms(lambda: ops.swiglu_backward(hidden, weights, active)), 2 * size)


if __name__ == "__main__":
    main()
