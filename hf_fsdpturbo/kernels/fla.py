"""flash-linear-attention (FLA): the one file that imports it, when it can run, and how it is called.

Shape legend: B batch, S sequence, Hk / Hv key / value heads, Dk / Dv head sizes, Ch conv channels, W conv width.

Three things differ from calling FLA through Transformers 5.24. ``chunk_size`` arrives: Transformers' wrapper passes on
only the named parameters of FLA's function, and FLA takes ``chunk_size`` through ``**kwargs``, so it is dropped there.
FLA's own convolution, which keeps documents apart, comes with the rule. And whether FLA can run is asked before
training starts (whether it is right: fla_trial.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from hf_fsdpturbo.compat import OPTIONAL, is_available
from hf_fsdpturbo.packing.documents import Documents

# The flag of FLA 0.6 that its gated backward asks; FLA is not installed where our tests of upstream names run, so
# tests/device sees whether it is still there.
_SAYS_TRITON_IS_RIGHT = "TRITON_ABOVE_3_7_1"


def lift_refusal() -> Callable[[], None]:
    """Let FLA run its gated backward whatever Triton is installed; returns the way back."""
    try:
        module = importlib.import_module("fla.ops.common.chunk_o")
        before = getattr(module, _SAYS_TRITON_IS_RIGHT)
    except (ImportError, AttributeError):  # another release of FLA: what it refuses then, the trial reports
        return lambda: None
    setattr(module, _SAYS_TRITON_IS_RIGHT, True)
    return lambda: setattr(module, _SAYS_TRITON_IS_RIGHT, before)


def why_not(device_type: str) -> str | None:
    """Why FLA cannot run on this device type, as the end of a sentence; None when it can, as far as is known."""
    if device_type not in ("cuda", "npu"):
        return f"flash-linear-attention has no {device_type} kernels"
    if not is_available("fla"):
        return f"flash-linear-attention is not installed ({OPTIONAL['fla'][1]})"
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
