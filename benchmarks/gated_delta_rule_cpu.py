"""Time our PyTorch gated delta rule against Transformers' in one run on CPU: forward and backward, and the ratio.

    python benchmarks/gated_delta_rule_cpu.py [--length 8192] [--heads 16] [--chunk-size 64] [--repeats 3]

One JSON line: seconds (best of the repeats) for both and `backward_ratio` = theirs / ours. Only the ratio is quoted.
"""

import argparse
import inspect
import json
import time

import torch
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from hf_fsdpturbo.kernels.gated_delta_rule import chunk_gated_delta_rule


def measure(rule, length: int, heads: int, head_dim: int, chunk_size: int, repeats: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, length, heads, head_dim)
    query, key, value = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    g = (-torch.rand(shape[:3], generator=generator)).requires_grad_()
    beta = torch.rand(shape[:3], generator=generator).requires_grad_()
    probe = torch.randn(shape, generator=generator)
    forward, backward = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        out, _ = rule(query, key, value, g=g, beta=beta, chunk_size=chunk_size, use_qk_l2norm_in_kernel=True)
        middle = time.perf_counter()
        grads = torch.autograd.grad(out, (query, key, value, g, beta), probe)
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
    return {"forward_s": min(forward), "backward_s": min(backward), "out": out.detach(), "grads": grads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--chunk-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    sizes = (args.length, args.heads, args.head_dim, args.chunk_size, args.repeats)
    theirs = measure(inspect.unwrap(modeling_qwen3_5_moe.torch_chunk_gated_delta_rule), *sizes)
    ours = measure(chunk_gated_delta_rule, *sizes)
    distance = max(
        ((a - b).norm() / b.norm()).item()
        for a, b in zip((ours["out"], *ours["grads"]), (theirs["out"], *theirs["grads"]), strict=True)
    )
    print(json.dumps({
        "length": args.length, "heads": args.heads, "head_dim": args.head_dim, "chunk_size": args.chunk_size,
        "threads": torch.get_num_threads(), "torch": torch.__version__,
        "ours": {k: round(ours[k], 3) for k in ("forward_s", "backward_s")},
        "transformers": {k: round(theirs[k], 3) for k in ("forward_s", "backward_s")},
        "forward_ratio": round(theirs["forward_s"] / ours["forward_s"], 2),
        "backward_ratio": round(theirs["backward_s"] / ours["backward_s"], 2),
        "largest_relative_distance": distance,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
