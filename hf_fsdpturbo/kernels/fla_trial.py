"""FLA's kernels are judged by their values: a trial step on the run's own head sizes and length, against our rule.

What versions of Triton and of FLA are known to do is not asked. FLA itself refuses its gated backward on Hopper with
Triton 3.4 to 3.7.0 (its issue 640), because blocks of 64 were miscompiled there; with head size 128 an H200 takes
blocks of 128, whose gradients are right. So that refusal is lifted for the trial, and stays lifted if it passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_fsdpturbo.arguments import CHUNK_SIZES
from hf_fsdpturbo.kernels import fla
from hf_fsdpturbo.kernels.causal_conv import causal_conv1d as torch_conv
from hf_fsdpturbo.kernels.gated_delta_rule import chunk_gated_delta_rule as torch_rule
from hf_fsdpturbo.ops.relative_distance import relative_distance

TOLERANCE = 2e-2  # ||a-b||/||b||; bf16 rounding of the per-chunk states gives 3e-3 to 9e-3
LONGEST = 4096
"""Positions of a trial at most: kernels are made for head sizes and counts, not for the length."""
WORTH_SAYING = 10.0
"""Seconds of a trial that are told."""


@dataclass(frozen=True)
class TrialSizes:
    """What a run's linear-attention layers ask of the kernels on one rank.

    Attributes:
        key_heads, value_heads: of one rank (context parallelism divides them).
        key_dim, value_dim: head sizes.
        conv_width: taps of the convolution.
        chunk_size: of the rule.
        length: positions of a row, where it is known.
    """

    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 128
    value_dim: int = 128
    conv_width: int = 4
    chunk_size: int = 64
    length: int = 1024

    def __str__(self) -> str:
        return (
            f"{self.key_heads} key and {self.value_heads} value heads of {self.key_dim} and {self.value_dim}, chunk "
            f"size {self.chunk_size}, {self.length} positions"
        )


def trial(device: torch.device, sizes: TrialSizes) -> tuple[str | None, float]:
    """Run a packed forward and backward of the rule and of the convolution on the device and compare with ours.

    An FLA that cannot compile, or computes something else, is found here and not in the first training step. A
    compiler's own exception passes through and ends the run.

    Returns:
        What is wrong, as the end of a sentence, or None; and the seconds it took, tuning included.
    """
    start = time.perf_counter()
    restore = fla.lift_refusal()
    problem = _compare(device, sizes)
    if problem is not None:
        restore()
    return problem, time.perf_counter() - start


def _compare(device: torch.device, sizes: TrialSizes) -> str | None:
    generator = torch.Generator().manual_seed(0)
    length = max(2, min(sizes.length, LONGEST))
    first = max(1, length * 5 // 8)
    lengths = torch.tensor([0, first, length], dtype=torch.int32, device="cpu").to(device)
    keys, values = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)
    channels = 2 * keys[0] * keys[1] + values[0] * values[1]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    rule = {"query": draw(1, length, *keys), "key": draw(1, length, *keys), "value": draw(1, length, *values),
            "g": -draw(1, length, values[0]).sigmoid(), "beta": draw(1, length, values[0]).sigmoid()}  # fmt: skip
    convolution = {"x": draw(1, channels, length), "weight": draw(channels, sizes.conv_width)}
    options: dict[str, Any] = {
        "chunk_size": sizes.chunk_size, "use_qk_l2norm_in_kernel": True, "cu_seqlens": lengths
    }  # fmt: skip
    whole: dict[str, Any] = {"initial_state": None, "output_final_state": False, "documents": None}

    def fla_rule(**x: torch.Tensor) -> torch.Tensor:
        return fla.chunk_rule(**x, **options, **whole)[0]  # type: ignore[arg-type]

    def our_rule(**x: torch.Tensor) -> torch.Tensor:
        return torch_rule(**x, **options)[0]  # type: ignore[arg-type]

    def fla_conv(**x: torch.Tensor) -> torch.Tensor:
        return fla.conv(**x, bias=None, activation="silu", cu_seqlens=lengths, documents=None)

    def our_conv(**x: torch.Tensor) -> torch.Tensor:
        return torch_conv(**x, activation="silu", cu_seqlens=lengths)

    cases = (("gated delta rule", fla_rule, our_rule, rule, (1, length, *values)),
             ("convolution", fla_conv, our_conv, convolution, (1, channels, length)))  # fmt: skip
    for what, theirs, ours, drawn, shape in cases:
        probe = draw(*shape)
        with torch.enable_grad():
            try:
                found = _outputs(theirs, drawn, probe, torch.bfloat16, device)
            except (RuntimeError, ImportError) as error:
                larger = max(CHUNK_SIZES)
                other = f" (chunk_size {larger} may work)" if sizes.chunk_size < larger else ""
                return (
                    f"flash-linear-attention's {what} failed in a trial step on {device} at chunk size "
                    f"{sizes.chunk_size}{other}: {error}"
                )
            expected = _outputs(ours, drawn, probe, torch.float32, device)
        worst = max(
            ((name, relative_distance(a, b)) for name, a, b in zip(("output", *drawn), found, expected, strict=True)),
            key=lambda entry: entry[1] if entry[1] == entry[1] else float("inf"),
        )
        if not worst[1] < TOLERANCE:
            which = "output" if worst[0] == "output" else f"gradient of {worst[0]}"
            return (
                f"flash-linear-attention's {what} is wrong in a trial step on {device} with {sizes}: its {which} is "
                f"off by {worst[1]:.2g} of its length (allowed {TOLERANCE:g})"
            )
    return None


def _outputs(
    function: Callable[..., torch.Tensor],
    drawn: dict[str, torch.Tensor],
    probe: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """The output, then the gradient of each input; inputs in ``dtype``, the decay g always in float32."""
    x = {n: t.to(device, torch.float32 if n == "g" else dtype).requires_grad_() for n, t in drawn.items()}
    out = function(**x)
    return [out.detach(), *torch.autograd.grad(out, list(x.values()), probe.to(device, out.dtype))]
