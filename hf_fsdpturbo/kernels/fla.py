"""flash-linear-attention (FLA): the one file that imports it, when it can run, and how it is called.

Shape legend: B batch, S sequence, Hk / Hv key / value heads, Dk / Dv head sizes, Ch conv channels, W conv width.

Three things differ from calling FLA through Transformers 5.24. ``chunk_size`` arrives: Transformers' wrapper passes on
only the named parameters of FLA's function, and FLA takes ``chunk_size`` through ``**kwargs``, so it is dropped there.
FLA's own convolution, which keeps documents apart, comes with the rule. And whether FLA can run is asked before
training starts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version

from hf_fsdpturbo.arguments import CHUNK_SIZES
from hf_fsdpturbo.compat import OPTIONAL, installed_version, is_available
from hf_fsdpturbo.kernels.gated_delta_rule import causal_conv1d as torch_conv
from hf_fsdpturbo.kernels.gated_delta_rule import chunk_gated_delta_rule as torch_rule
from hf_fsdpturbo.packing.documents import Documents

HOPPER_MAJOR = 9  # CUDA compute capability of H100, H200, GH200
BAD_TRITON = (Version("3.4"), Version("3.7.1"))  # [first wrong, first right) on Hopper: FLA issue 640
TILELANG = "tilelang"  # FLA's other backend for that one kernel
SELF_CHECK_TOLERANCE = 2e-2  # ||a-b||/||b||; bf16 rounding of the per-chunk states gives 3e-3 to 8e-3


def known_bad_pair(capability: tuple[int, int] | None, triton: Version | None, has_tilelang: bool) -> str | None:
    """The sentence for Hopper with a Triton whose gated backward is wrong, or None (FLA raises at that backward)."""
    if capability is None or capability[0] != HOPPER_MAJOR or triton is None or has_tilelang:
        return None
    if BAD_TRITON[0] <= Version(triton.base_version) < BAD_TRITON[1]:
        return (
            f"Triton {triton} computes wrong gradients for FLA's gated delta rule on Hopper (compute capability "
            f"{capability[0]}.{capability[1]}); install triton>={BAD_TRITON[1]} or tilelang"
        )
    return None


def why_not(device_type: str) -> str | None:
    """Why FLA cannot run on this device type, as the end of a sentence; None when it can, as far as is known."""
    if device_type not in ("cuda", "npu"):
        return f"flash-linear-attention has no {device_type} kernels"
    if not is_available("fla"):
        return f"flash-linear-attention is not installed ({OPTIONAL['fla'][1]})"
    if device_type == "cuda":
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        bad = known_bad_pair(capability, installed_version("triton"), is_available(TILELANG))
        if bad is not None:
            return bad
    try:
        _operators()
    except ImportError as error:
        return f"flash-linear-attention is installed but cannot be imported: {error}"
    return None


def _operators() -> tuple[Any, Any]:
    """``fla.ops.gated_delta_rule`` and the function of ``fla.modules.causal_conv1d``.

    Raises:
        ImportError: there is no Triton.
    """
    rules = importlib.import_module("fla.ops.gated_delta_rule")
    conv = importlib.import_module("fla.modules.causal_conv1d")
    return rules, conv.causal_conv1d


def chunk_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor | None,
    documents: Documents | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FLA's chunk rule, shapes as in gated_delta_rule.py. A packed batch of B rows runs as one row of B * S positions.

    ``g`` stays float32; key and query heads are not repeated (FLA groups them itself).

    Returns:
        The output, and the state: with documents that of each row's last one, ``[B, Hv, Dk, Dv]``, where FLA itself
        returns one for every document.
    """
    rules, _ = _operators()
    lengths: dict[str, Any] = {"cu_seqlens": cu_seqlens}
    inputs = [query, key, value, g, beta]
    if documents is not None:
        lengths = {"cu_seqlens": documents.cu_seqlens, "cu_seqlens_cpu": documents.cu_seqlens_cpu}
        inputs = [x.reshape(1, -1, *x.shape[2:]) for x in inputs]
    q, k, v, decay, write = inputs
    out, state = rules.chunk_gated_delta_rule(
        q, k, v, decay, write, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, chunk_size=chunk_size, **lengths,
    )  # fmt: skip
    if documents is not None and state is not None:
        row_ends = torch.arange(1, value.shape[0] + 1) * value.shape[1]
        state = state[torch.searchsorted(documents.cu_seqlens_cpu, row_ends.to(torch.int32)) - 1]
    return out.reshape(value.shape), state


def recurrent_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FLA's token-by-token rule, for generation: it has no backward."""
    rules, _ = _operators()
    accepted = ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens")
    given = {name: kwargs[name] for name in accepted if name in kwargs}
    out, state = rules.fused_recurrent_gated_delta_rule(query, key, value, **given)
    return out, state


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    cu_seqlens: torch.Tensor | None,
    documents: Documents | None,
) -> torch.Tensor:
    """FLA's causal convolution our way: ``x [B, Ch, S]`` in and out, ``weight [Ch, W]``; silu, swish or None."""
    _, causal_conv1d = _operators()
    rows = x.transpose(1, 2)  # FLA: [B, S, Ch]
    lengths: dict[str, Any] = {"cu_seqlens": cu_seqlens}
    if documents is not None:
        lengths = {"cu_seqlens": documents.cu_seqlens, "cu_seqlens_cpu": documents.cu_seqlens_cpu}
        rows = rows.reshape(1, -1, x.shape[1])
    out, _ = causal_conv1d(rows.contiguous(), weight, bias, activation=activation, **lengths)
    return out.reshape(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)


def self_check(
    device: torch.device, chunk_size: int, key_dim: int, value_dim: int, conv_width: int = 4
) -> str | None:
    """Run a small packed forward and backward of the rule and of the convolution on the device and compare with ours.

    An FLA that cannot compile, or computes something else, is found here and not in the first training step. A
    compiler's own exception passes through and ends the run.

    Returns:
        What is wrong, as the end of a sentence, or None.
    """
    generator = torch.Generator().manual_seed(0)
    channels = 2 * key_dim + 2 * value_dim
    lengths = torch.tensor([0, 50, 80], dtype=torch.int32, device="cpu").to(device)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    rule = {"query": draw(1, 80, 1, key_dim), "key": draw(1, 80, 1, key_dim), "value": draw(1, 80, 2, value_dim),
            "g": -draw(1, 80, 2).sigmoid(), "beta": draw(1, 80, 2).sigmoid()}  # fmt: skip
    convolution = {"x": draw(1, channels, 80), "weight": draw(channels, conv_width)}
    options: dict[str, Any] = {"chunk_size": chunk_size, "use_qk_l2norm_in_kernel": True, "cu_seqlens": lengths}
    whole: dict[str, Any] = {"initial_state": None, "output_final_state": False, "documents": None}

    def fla_rule(**x: torch.Tensor) -> torch.Tensor:
        return chunk_rule(**x, **options, **whole)[0]  # type: ignore[arg-type]

    def our_rule(**x: torch.Tensor) -> torch.Tensor:
        return torch_rule(**x, **options)[0]  # type: ignore[arg-type]

    def fla_conv(**x: torch.Tensor) -> torch.Tensor:
        return conv(**x, bias=None, activation="silu", cu_seqlens=lengths, documents=None)

    def our_conv(**x: torch.Tensor) -> torch.Tensor:
        return torch_conv(**x, activation="silu", cu_seqlens=lengths)

    cases = (("gated delta rule", fla_rule, our_rule, rule, (1, 80, 2, value_dim)),
             ("convolution", fla_conv, our_conv, convolution, (1, channels, 80)))  # fmt: skip
    for what, theirs, ours, drawn, shape in cases:
        probe = draw(*shape)
        with torch.enable_grad():
            try:
                found = _outputs(theirs, drawn, probe, torch.bfloat16, device)
            except (RuntimeError, ImportError) as error:
                other = f" (chunk_size {max(CHUNK_SIZES)} may work)" if chunk_size < max(CHUNK_SIZES) else ""
                return (
                    f"flash-linear-attention's {what} failed in a trial step on {device} at chunk size "
                    f"{chunk_size}{other}: {error}"
                )
            expected = _outputs(ours, drawn, probe, torch.float32, device)
        for name, a, b in zip(("output", *(f"gradient of {name}" for name in drawn)), found, expected, strict=True):
            distance = ((a.float() - b).norm() / b.norm()).item()
            if not distance <= SELF_CHECK_TOLERANCE:
                return (
                    f"flash-linear-attention's {what} is wrong in a trial step on {device}: {name} is {distance:.1e} "
                    "off"
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
