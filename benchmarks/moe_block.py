"""One MoE block on one device: ours, Transformers' grouped_mm path, and the six grouped matmuls that both must do.

Prints a table: forward and forward + backward, ratio to the matmul floor, peak memory, distance to Transformers'
result, and
our kernels one by one. `--tiny` runs small shapes (CPU too; times mean nothing there).
"""

import argparse
import json
import time
import types

import torch
from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward

from hf_fsdpturbo.dispatch.fused import FusedDispatcher
from hf_fsdpturbo.ops import torch as plain
from hf_fsdpturbo.ops.table import get_ops

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


class Experts:
    """``dispatch.LocalExperts`` over two plain tensors."""

    is_plain_swiglu = True

    def __init__(self, gate_up, down):
        self.pair = (gate_up, down)
        self.num_local_experts = gate_up.shape[0]

    def weights(self):
        return self.pair


def median_ms(function):
    if ON_GPU:
        from triton.testing import do_bench

        return do_bench(function, warmup=50, rep=300, return_mode="median")
    function()
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def draw(a):
    torch.manual_seed(0)
    T, K, E, D, F = (256, 2, 8, 64, 32) if a.tiny else (a.tokens, a.top_k, a.experts, 2048, 768)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x = torch.randn(T, D, device=DEVICE, dtype=dtype).requires_grad_()
    gate_up = (torch.randn(E, 2 * F, D, device=DEVICE, dtype=dtype) * 0.02).requires_grad_()
    down = (torch.randn(E, D, F, device=DEVICE, dtype=dtype) * 0.02).requires_grad_()
    logits = torch.randn(T, E, device=DEVICE) + torch.randn(E, device=DEVICE) * 0.5
    weights, index = torch.topk(logits.softmax(-1), K, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype).detach().requires_grad_()
    return x, weights, gate_up, down, index, torch.randn(T, D, device=DEVICE, dtype=dtype)


def transformers_block(gate_up, down):
    module = types.SimpleNamespace(
        num_experts=gate_up.shape[0], _is_expert_parallel=False, has_gate=True, has_bias=False,
        has_post_expert_norm=False, is_transposed=False, gate_up_proj=gate_up, down_proj=down,
        act_fn=torch.nn.functional.silu,
    )  # fmt: skip
    module._apply_gate = lambda hidden: _default_apply_gate(module, hidden)
    return lambda x, index, weights: grouped_mm_experts_forward(module, x, index, weights)


def measure(block, x, weights, gate_up, down, index, gradient):
    leaves = (x, weights, gate_up, down)

    def step():
        for leaf in leaves:
            leaf.grad = None
        block(x, index, weights).backward(gradient)

    step()
    peak = None
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - base) / 2**30
    values = [block(x, index, weights).detach().double().cpu(), *(leaf.grad.double().cpu() for leaf in leaves)]
    with torch.no_grad():
        forward = median_ms(lambda: block(x, index, weights))
    return dict(forward_ms=forward, both_ms=median_ms(step), peak_gib=peak), values


def exact(x, weights, gate_up, down, index, gradient):
    """The same in float32 on the same device, a loop over experts."""
    leaves = [t.detach().float().requires_grad_() for t in (x, weights, gate_up, down)]
    out = torch.zeros_like(leaves[0])
    for expert in range(gate_up.shape[0]):
        token, k = (index == expert).nonzero(as_tuple=True)
        gate, up = (leaves[0][token] @ leaves[2][expert].T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ leaves[3][expert].T
        out = out.index_add(0, token, y * leaves[1][token, k, None])
    out.backward(gradient.float())
    return [out.detach().double().cpu(), *(leaf.grad.double().cpu() for leaf in leaves)]


def floor(x, weights, gate_up, down, index, ops):
    """Milliseconds by name: the six grouped matmuls (torch's, and those that ops takes), and each of our kernels."""
    experts, top_k = gate_up.shape[0], index.shape[1]
    gate_up, down, x = gate_up.detach(), down.detach(), x.detach()
    slots, ends = ops.own_slots(index, experts)
    S, D, F = index.numel(), x.shape[1], down.shape[2]
    rows, hidden, active, back = (x.new_empty(S, n) for n in (D, 2 * F, F, D))
    for tensor in (rows, hidden, active, back):
        tensor.normal_()
    weights_S = torch.rand(S, device=x.device)
    out = torch.empty_like(x)

    def matmuls(grouped_mm):
        return {
            "up": lambda: grouped_mm(rows, gate_up.transpose(1, 2), ends),
            "down": lambda: grouped_mm(active, down.transpose(1, 2), ends),
            "d active": lambda: grouped_mm(back, down, ends),
            "d rows": lambda: grouped_mm(hidden, gate_up, ends),
            "d gate_up": lambda: grouped_mm(hidden.t(), rows, ends),
            "d down": lambda: grouped_mm(back.t(), active, ends),
        }

    others = {
        "slots": (1, lambda: ops.own_slots(index, experts)),
        "scatter rows": (3, lambda: ops.scatter_rows(x, slots, rows)),
        "gather sum": (2, lambda: ops.gather_sum(rows, slots, out)),
        "swiglu": (1, lambda: ops.swiglu(hidden, weights_S)),
        "swiglu backward": (1, lambda: ops.swiglu_backward(hidden, weights_S, active)),
    }
    assert top_k == slots.shape[1]
    gemm, taken = (
        {name: median_ms(function) for name, function in matmuls(grouped_mm).items()}
        for grouped_mm in (plain.grouped_mm, ops.grouped_mm)
    )
    rest = {name: (times, median_ms(function)) for name, (times, function) in others.items()}
    return gemm, taken, rest


def empty_expert_check(ops, gate_up, down):
    """A grouped matmul writes zeros for a group without rows (the memory is poisoned first)."""
    experts, features, hidden = gate_up.shape
    poison = torch.full_like(gate_up, float("nan"))
    del poison
    left, right = gate_up.new_ones(64, features), gate_up.new_ones(64, hidden)
    ends = torch.full((experts,), 64, dtype=torch.int32, device=gate_up.device)
    ends[0] = 0  # expert 0 empty, expert 1 has all rows, the rest empty
    got = ops.grouped_mm(left.t(), right, ends)
    return bool((got[0] == 0).all() and (got[2:] == 0).all() and (got[1] == 64).all())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--out", default=None)
    a = parser.parse_args()
    ops = get_ops(DEVICE)
    inputs = draw(a)
    x, weights, gate_up, down, index, gradient = inputs
    dispatcher, experts = FusedDispatcher(None, gate_up.shape[0]), Experts(gate_up, down)
    results, values = {}, {}
    results["ours"], values["ours"] = measure(lambda x, i, w: dispatcher(x, i, w, experts), *inputs)
    results["transformers"], values["transformers"] = measure(transformers_block(gate_up, down), *inputs)
    reference = exact(*inputs)
    gemm, taken, rest = floor(x, weights, gate_up, down, index, ops)
    total = sum(gemm.values())
    results["floor"], results["taken"] = gemm, taken
    results["kernels"] = {name: dict(times=times, ms=ms) for name, (times, ms) in rest.items()}
    print(f"six grouped matmuls {total:.3f} ms: " + ", ".join(f"{name} {ms:.3f}" for name, ms in gemm.items()))
    print(f"those taken {sum(taken.values()):.3f} ms: " + ", ".join(f"{name} {ms:.3f}" for name, ms in taken.items()))
    print("others: " + ", ".join(f"{name} {times} x {ms:.3f}" for name, (times, ms) in rest.items()))
    print(f"matmuls + others {total + sum(times * ms for times, ms in rest.values()):.3f} ms")
    print(f"empty experts give zero gradients: {empty_expert_check(ops, gate_up.detach(), down.detach())}")
    for name in ("ours", "transformers"):
        r = results[name]
        r["ratio"] = r["both_ms"] / total
        r["distance"] = [((u - v).norm() / v.norm()).item() for u, v in zip(values[name], reference, strict=True)]
        peak = "-" if r["peak_gib"] is None else f"{r['peak_gib']:.2f}"
        print(
            f"{name:13s} forward {r['forward_ms']:7.3f} ms, both {r['both_ms']:7.3f} ms = {r['ratio']:.3f} x matmuls, "
            f"peak {peak} GiB, off float32 (out, x, weights, gate_up, down): "
            + " ".join(f"{value:.1e}" for value in r["distance"])
        )
    if a.out:
        with open(a.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
