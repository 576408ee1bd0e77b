"""The LM head with its loss on one device: TRL's chunked one, Liger's, ours, and the three matmuls that all must do.

Prints milliseconds forward + backward, the ratio to the matmuls and to TRL, peak memory beside the inputs, and the
distance of log-probabilities and gradients to float32. `--tiny` runs small shapes (CPU too; times mean nothing there).
"""

import argparse
import json

import torch
from trl.kernels import ChunkedLogProbFunction

from benchmarks.moe_block import DEVICE, ON_GPU, median_ms
from hf_fsdpturbo.lm_head.linear_cross_entropy import linear_cross_entropy, tile_rows
from hf_fsdpturbo.ops.table import LogitTransform, get_ops

OUTPUTS = ("log_probs", "entropy", "is_top1")  # what SFTTrainer asks for


def draw(a):
    torch.manual_seed(0)
    N, D, V = (200, 64, 1000) if a.tiny else (a.tokens, a.hidden, a.vocabulary)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    hidden = torch.randn(N, D, device=DEVICE, dtype=dtype)
    weight = torch.randn(V, D, device=DEVICE, dtype=dtype) * 0.02
    return hidden, weight, torch.randint(V, (N,), device=DEVICE)


def heads(targets):
    """Name -> function of hidden states and weight that gives the mean loss."""

    def trl(hidden, weight):
        return -ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32768, None, 1.0, OUTPUTS)[0].mean()

    def ours(hidden, weight):
        return -linear_cross_entropy(hidden, weight, None, targets)[0].mean()

    found = {"TRL": trl, "ours": ours}
    if ON_GPU:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        found["Liger"] = lambda hidden, weight: loss(weight, hidden, targets)
    return found


def exact(hidden, weight, targets, rows=1024):
    """Loss and gradients in float32 (float64 on CPU), some rows at a time; matmuls without TF32."""
    dtype = torch.float32 if ON_GPU else torch.float64
    w, total = weight.to(dtype), hidden.new_zeros((), dtype=torch.float64)
    d_hidden, d_weight = torch.empty_like(hidden, dtype=dtype), torch.zeros_like(w)
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        h, t = hidden[part].to(dtype), targets[part, None]
        log_p = (h @ w.T).log_softmax(-1)
        total -= log_p.gather(1, t).double().sum()
        gradient = log_p.exp_().scatter_add_(1, t, -torch.ones_like(t, dtype=dtype)) / len(hidden)
        d_hidden[part] = gradient @ w
        d_weight.addmm_(gradient.T, h)
    return [total / len(hidden), d_hidden, d_weight]


def measure(head, hidden, weight):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]

    def step():
        for leaf in leaves:
            leaf.grad = None
        loss = head(*leaves)
        loss.backward()
        return loss

    step()
    peak = None
    if ON_GPU:
        for leaf in leaves:
            leaf.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - base) / 2**30
    values = [step().detach(), *(leaf.grad for leaf in leaves)]
    return dict(ms=median_ms(step), peak_gib=peak), values


def floor(hidden, weight, targets):
    """Milliseconds of the three matmuls in our tiles, and of our kernel, for all tokens."""
    ops, rows = get_ops(DEVICE), tile_rows(len(hidden), len(weight), hidden.element_size(), DEVICE)
    h, t = hidden[:rows], targets[:rows]
    logits, total = h @ weight.T, torch.zeros_like(weight, dtype=torch.float32)
    d_hidden, tiles = torch.zeros_like(h, dtype=torch.float32), len(hidden) / len(h)
    parts = {
        "logits": lambda: torch.mm(h, weight.T, out=logits),
        "d hidden": lambda: ops.add_product_(d_hidden, logits, weight),
        "d weight": lambda: ops.add_product_(total, logits.T, h),
        "cross entropy": lambda: ops.cross_entropy_(logits, t, LogitTransform()),
    }
    return {name: tiles * median_ms(function) for name, function in parts.items()}


def kernel_shapes(hidden, weight, targets):
    """Milliseconds of our kernel for all tokens in other shapes of its programs (block, warps)."""
    from hf_fsdpturbo.ops import triton_cross_entropy as kernel

    rows, own = tile_rows(len(hidden), len(weight), hidden.element_size(), DEVICE), (kernel._BLOCK, kernel._WARPS)
    logits, t = hidden[:rows] @ weight.T, targets[:rows]
    found = {}
    for shape in ((4096, 8), (2048, 4), (2048, 8), (4096, 16), (8192, 16), (8192, 32)):
        kernel._BLOCK, kernel._WARPS = shape
        ms = median_ms(lambda: kernel.cross_entropy_(logits, t, LogitTransform()))
        found[f"{shape[0]} x {shape[1]}"] = ms * len(hidden) / len(t)
    kernel._BLOCK, kernel._WARPS = own
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--out", default=None)
    a = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    hidden, weight, targets = draw(a)
    truth = exact(hidden, weight, targets)
    parts = floor(hidden, weight, targets)
    matmuls = sum(ms for name, ms in parts.items() if name != "cross entropy")
    print(f"matmuls {matmuls:.2f} ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items()))
    results = {"parts": parts}
    if ON_GPU:
        results["kernel"] = kernel_shapes(hidden, weight, targets)
        shapes = ", ".join(f"{name} {ms:.2f}" for name, ms in results["kernel"].items())
        print(f"cross entropy, block x warps: {shapes}")
    for name, head in heads(targets).items():
        r, values = measure(head, hidden, weight)
        r["distance"] = [
            ((u.double() - v.double()).norm() / v.double().norm()).item() for u, v in zip(values, truth, strict=True)
        ]
        results[name] = r
        peak = "-" if r["peak_gib"] is None else f"{r['peak_gib']:.2f}"
        ratio = f"{r['ms'] / matmuls:.3f} x matmuls, {r['ms'] / results['TRL']['ms']:.3f} x TRL"
        off = " ".join(f"{x:.1e}" for x in r["distance"])
        print(f"{name:6s} {r['ms']:8.2f} ms = {ratio}, peak {peak} GiB, off float32 (loss, hidden, weight): {off}")
        del values
    if a.out:
        with open(a.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
