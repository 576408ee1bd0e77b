"""Tokens per second of one Qwen3.5-35B-A3B linear-attention layer, forward and backward, with FLA and with PyTorch.

    python benchmarks/linear_attention_gpu.py [--batch 1] [--length 8192] [--steps 10] [--chunks 64]
        [--before FILE] [--without-transformers] [--cpu]

One JSON line a variant: FLA at each chunk size (and how long its trial took: run twice for cold and warm caches), our
PyTorch rule, that of an older gated_delta_rule.py (``--before``), and Transformers' PyTorch rule (its backward is
quadratic in the length). ``off`` is the worst distance from our rule in float32, output or gradient, on 1,024
positions. Only ratios within one run are quoted.
"""

import argparse
import copy
import importlib.util
import inspect
import json
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

from hf_fsdpturbo.arguments import KernelParams
from hf_fsdpturbo.kernels import linear_attention
from hf_fsdpturbo.kernels.apply import apply_kernels

FLA = "flash-linear-attention"


def one_layer_model(device: str) -> torch.nn.Module:
    """The released layer's sizes (a small one on a CPU), in a holder that apply_kernels accepts as a model."""
    small = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} if device == "cpu" else {}
    sizes = {"linear_num_key_heads": 16, "linear_num_value_heads": 32} | small
    config = Qwen3_5MoeTextConfig(
        hidden_size=2048, linear_key_head_dim=128, linear_value_head_dim=128, num_hidden_layers=1,
        layer_types=["linear_attention"], **sizes,
    )  # fmt: skip
    layer = modeling.Qwen3_5MoeGatedDeltaNet(config, 0)
    return torch.nn.ModuleDict({"linear_attn": layer}).to(device, torch.bfloat16)


def milliseconds_a_step(layer: torch.nn.Module, hidden: torch.Tensor, steps: int) -> float:
    def step() -> None:
        layer.zero_grad()
        layer(hidden_states=hidden).float().square().mean().backward()

    for _ in range(3):
        step()
    if hidden.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if hidden.device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / steps


def device_milliseconds(layer: torch.nn.Module, hidden: torch.Tensor) -> float:
    """How long the device works in a step, whatever the host does."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        layer(hidden_states=hidden).float().square().mean().backward()
        torch.cuda.synchronize()
    return sum(e.device_time_total for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA) / 1000


def gradients(model: torch.nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = hidden[:, :1024].detach().clone().requires_grad_()
    out = model["linear_attn"](hidden_states=x)
    probe = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out.float() * probe).sum().backward()
    found = [out, x.grad, *(p.grad for p in model.parameters())]
    return [t.detach().float() for t in found if t is not None]


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def older_rule(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("older_gated_delta_rule", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.chunk_gated_delta_rule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--chunks", default="64")
    parser.add_argument("--before", help="an older gated_delta_rule.py, timed beside ours")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal")
    args = parser.parse_args()
    device = "cpu" if args.cpu else "cuda"
    torch.manual_seed(0)
    model = one_layer_model(device)
    hidden = torch.randn(args.batch, args.length, 2048, device=device, dtype=torch.bfloat16, requires_grad=True)
    ours = KernelParams([FLA]) if args.cpu else KernelParams(["auto"])
    report = apply_kernels(model, ours, device, length=args.length)
    exact = gradients(copy.deepcopy(model).float(), hidden.float())
    report.close()
    rows = []

    def measure(name: str, params: KernelParams) -> None:
        start = time.perf_counter()
        report = apply_kernels(model, params, device, length=args.length)
        seconds = time.perf_counter() - start
        row = {"variant": name, "apply_s": round(seconds, 1), "off": worst(gradients(model, hidden), exact)}
        row["ms"] = milliseconds_a_step(model["linear_attn"], hidden, args.steps)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            row["device_ms"] = device_milliseconds(model["linear_attn"], hidden)
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        row["notices"] = [notice[:300] for notice in report.notices]
        rows.append(row)
        print(json.dumps(row), flush=True)
        report.close()

    measure("pytorch, ours", ours)
    if args.before:
        new = linear_attention.chunk_gated_delta_rule
        linear_attention.chunk_gated_delta_rule = older_rule(args.before)
        measure("pytorch, before", ours)
        linear_attention.chunk_gated_delta_rule = new
    for chunk in [] if args.cpu else [int(text) for text in args.chunks.split(",") if text]:
        measure(f"fla, chunk {chunk}", KernelParams([FLA], None, chunk))
    if not args.without_transformers:
        names = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
        originals = {name: getattr(modeling, name) for name in names}
        for name, function in originals.items():
            setattr(modeling, name, inspect.unwrap(function))
        ms = milliseconds_a_step(model["linear_attn"], hidden, args.steps)
        rows.append({"variant": "pytorch, transformers", "ms": ms})
        for name, function in originals.items():
            setattr(modeling, name, function)
    base = rows[0]["ms"]
    for row in rows:
        device_ms = f"{row['device_ms']:8.2f}" if "device_ms" in row else "       -"
        print(f"{row['variant']:24} {row['ms']:8.2f} ms, device {device_ms}, {row['ms'] / base:6.3f} of ours, "
              f"off {row.get('off', float('nan')):.1e}")  # fmt: skip
    print(f"{args.batch} x {args.length} positions on {device}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
