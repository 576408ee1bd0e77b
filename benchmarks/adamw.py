"""One optimizer step on one device: norm, clip and torch's fused AdamW against norm and our AdamW, which clips itself.

Prints milliseconds and GB/s (each tensor that a step must read or write counted once), the distance of both to torch
in float32, and program shapes of our kernels tried in turn. `--tiny` runs small shapes on CPU (times mean nothing).
"""

import argparse
import json

import torch
from torch import nn

from benchmarks.moe_block import median_ms
from hf_fsdpturbo.grad_norm import clip_groups_, measure_groups, parameter_groups
from hf_fsdpturbo.ops.table import get_ops
from hf_fsdpturbo.ops.weight_copies import WeightCopies
from hf_fsdpturbo.optim.one_pass import AdamW

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
OPTIONS = dict(lr=1e-5, weight_decay=0.01)
ADAMW_SHAPES = [(2048, 8), (1024, 8), (1024, 4), (2048, 4), (4096, 8), (4096, 16)]
SQUARE_SHAPES = [(4096, 8), (8192, 8), (4096, 4), (2048, 4), (16384, 8)]


class Weights(nn.Module):
    """Stacked experts of ``layers`` layers of Qwen3-30B-A3B's shape, and an embedding."""

    def __init__(self, a, dtype):
        super().__init__()
        E, D, F, V = (8, 64, 32, 512) if a.tiny else (128, 2048, 768, 151936)
        shapes = [(E, 2 * F, D), (E, D, F), (D,), (4096 if ON_GPU else 64, D)] * a.layers + [(V, D)]
        torch.manual_seed(0)
        make = dict(device=DEVICE, dtype=dtype)
        self.members = nn.ParameterList(nn.Parameter(torch.randn(shape, **make) * 0.02) for shape in shapes)
        for parameter in self.members:
            parameter.grad = torch.randn_like(parameter)
        self.copies = WeightCopies()

    def cast(self):
        """bf16 copies of the experts, as the next forward needs them."""
        for number, parameter in enumerate(self.members):
            if parameter.ndim == 3:
                self.copies.get(str(number), parameter, torch.bfloat16)


def pieces(a, dtype):
    """``(name, bytes, function)`` of each piece, both sides on the same weights and gradients."""
    model = Weights(a, dtype)
    groups, ops = parameter_groups(model), get_ops(DEVICE)
    gradients = [parameter.grad for parameter in model.members]
    theirs = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    ours = AdamW(model.parameters(), **OPTIONS)
    size = sum(parameter.nbytes for parameter in model.members)
    experts = sum(parameter.numel() for parameter in model.members if parameter.ndim == 3)
    copies = 2 * experts if dtype == torch.float32 else 0

    def torch_step():
        clip_groups_(groups, 1e-3)
        theirs.step()
        if copies:
            model.cast()

    def our_step():
        if copies:
            model.cast()  # converts nothing after the first call
        _, ours.gradient_factor = measure_groups(groups, 1e-3)
        ours.step()

    def our_update():
        ours.gradient_factor = torch.full((), 0.5, device=DEVICE)
        ours.step()

    def torch_norm():
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        return torch.stack(norms).square().sum()

    yield "a plain copy", 2 * size, plain_copy(model)
    yield "norm, torch foreach", size, torch_norm
    yield "norm, ours", size, lambda: ops.square_sum(gradients)
    yield "AdamW, torch fused", 7 * size, theirs.step
    yield "AdamW, ours with factor", 7 * size, our_update
    yield "whole step, torch", 10 * size + (copies + 4 * experts if copies else 0), torch_step
    yield "whole step, ours", 8 * size + copies, our_step


def plain_copy(model):
    source = max((parameter.grad for parameter in model.members), key=torch.Tensor.numel)
    size = sum(parameter.nbytes for parameter in model.members)
    target, times = torch.empty_like(source), max(1, size // source.nbytes)

    def copy():
        for _ in range(times):
            target.copy_(source)

    return copy


def measure(a, dtype):
    found = {}
    for name, size, function in pieces(a, dtype):
        ms = median_ms(function)
        found[name] = dict(ms=round(ms, 3), gb_s=round(size / ms / 1e6))
        print(f"{str(dtype):16s} {name:26s} {ms:8.3f} ms {size / ms / 1e6:8.0f} GB/s", flush=True)
    return found


def distance(a, dtype):
    """After three clipped steps: how far weights are from torch's in float32 (gradients the same bf16 numbers)."""
    small = argparse.Namespace(**{**vars(a), "layers": 1})
    ends = []
    for kind, stored in (("torch", torch.float32), ("torch", dtype), ("ours", dtype)):
        model = Weights(small, torch.float32)
        start = [parameter.detach().to(dtype).float().clone() for parameter in model.members]
        for parameter in model.members:
            parameter.grad = None
            parameter.data = parameter.data.to(dtype).to(stored)
        made = AdamW if kind == "ours" else lambda p, **o: torch.optim.AdamW(p, fused=True, **o)
        optimizer, groups = made(model.parameters(), lr=1e-3, weight_decay=0.01), parameter_groups(model)
        for step in range(3):
            torch.manual_seed(step)
            for parameter in model.members:
                parameter.grad = torch.randn_like(parameter, dtype=torch.float32).to(dtype).to(stored)
            if kind == "ours":
                _, optimizer.gradient_factor = measure_groups(groups, 1.0)
            else:
                clip_groups_(groups, 1.0)
            optimizer.step()
        ends.append(torch.cat([(p.detach().float() - s).flatten() for p, s in zip(model.members, start, strict=True)]))
        del optimizer, groups, model
    exact, torchs, mine = ends
    far = {name: ((x - exact).norm() / exact.norm()).item() for name, x in (("torch", torchs), ("ours", mine))}
    print(f"{str(dtype):16s} update after 3 steps, off torch in float32: {far}", flush=True)
    return far


def sweep(a, dtype):
    """Program shapes; the first of each table is what ships."""
    from hf_fsdpturbo.ops import triton_adamw

    model = Weights(a, dtype)
    ours, gradients = AdamW(model.parameters(), **OPTIONS), [parameter.grad for parameter in model.members]
    size = sum(parameter.nbytes for parameter in model.members)
    for shape in ADAMW_SHAPES:
        triton_adamw.ADAMW_BLOCK, triton_adamw.ADAMW_WARPS = shape
        ms = median_ms(ours.step)
        print(f"{str(dtype):16s} AdamW {shape!s:12s} {ms:8.3f} ms {7 * size / ms / 1e6:8.0f} GB/s", flush=True)
    triton_adamw.ADAMW_BLOCK, triton_adamw.ADAMW_WARPS = ADAMW_SHAPES[0]
    for shape in SQUARE_SHAPES:
        triton_adamw.SQUARE_BLOCK, triton_adamw.SQUARE_WARPS = shape
        ms = median_ms(lambda: triton_adamw.square_sum(gradients))
        print(f"{str(dtype):16s} norm  {shape!s:12s} {ms:8.3f} ms {size / ms / 1e6:8.0f} GB/s", flush=True)
    triton_adamw.SQUARE_BLOCK, triton_adamw.SQUARE_WARPS = SQUARE_SHAPES[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sweep", action="store_true", help="program shapes too")
    parser.add_argument("--out", default=None)
    a = parser.parse_args()
    results = {}
    for dtype in (torch.bfloat16, torch.float32):
        results[str(dtype)] = dict(measure(a, dtype), distance=distance(a, dtype))
        if a.sweep and ON_GPU:
            sweep(a, dtype)
    if a.out:
        with open(a.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
