"""Tokens per second of one Qwen3.5-35B-A3B linear-attention layer, forward and backward, with FLA and with PyTorch.

    python benchmarks/linear_attention_gpu.py [--batch 1] [--length 8192] [--steps 10]

One JSON line a variant: FLA at chunk 16, 32 and 64, our PyTorch rule, and Transformers' PyTorch rule (its backward is
quadratic in the length). Only ratios within one run are quoted.
"""

import argparse
import inspect
import json

import torch
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

from hf_fsdpturbo.arguments import KernelParams
from hf_fsdpturbo.kernels import fla
from hf_fsdpturbo.kernels.apply import apply_kernels

FLA = "flash-linear-attention"


def one_layer_model() -> torch.nn.Module:
    """The released layer's sizes, in a holder that apply_kernels accepts as a model."""
    config = Qwen3_5MoeTextConfig(
        hidden_size=2048, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    layer = modeling.Qwen3_5MoeGatedDeltaNet(config, 0)
    return torch.nn.ModuleDict({"linear_attn": layer}).to("cuda", torch.bfloat16)


def seconds_a_step(layer: torch.nn.Module, hidden: torch.Tensor, steps: int) -> float:
    def step() -> None:
        layer.zero_grad()
        layer(hidden_states=hidden).float().square().mean().backward()

    for _ in range(3):
        step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = one_layer_model()
    hidden = torch.randn(args.batch, args.length, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    variants: dict[str, KernelParams | None] = {"pytorch, ours": KernelParams(["auto"])}
    reason = fla.why_not("cuda")
    if reason is None:
        variants = {f"fla, chunk {c}": KernelParams([FLA], None, c) for c in (16, 32, 64)} | variants
    else:
        print(json.dumps({"fla": reason}))
    results = {}
    for name, params in variants.items():
        report = apply_kernels(model, params, "cuda")
        results[name] = seconds_a_step(model["linear_attn"], hidden, args.steps)
        report.close()
    originals = {name: getattr(modeling, name) for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")}
    for name, function in originals.items():
        setattr(modeling, name, inspect.unwrap(function))
    results["pytorch, transformers"] = seconds_a_step(model["linear_attn"], hidden, args.steps)
    for name, function in originals.items():
        setattr(modeling, name, function)
    slowest = results["pytorch, ours"]
    for name, seconds in results.items():
        tokens = args.batch * args.length / seconds
        print(json.dumps({
            "variant": name, "tokens_per_s": round(tokens), "ms": round(1000 * seconds, 2),
            "speed_against_ours": round(slowest / seconds, 2), "gpu": torch.cuda.get_device_name(),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
