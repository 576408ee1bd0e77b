"""The gate of experts in half precision beside a float32 stream: computed in float32, as plain Transformers does.

Autocast reaches no grouped matmul, so plain runs experts that are stored in float32 in float32. Here their matmuls are
in half precision; what lies between them is not: half-precision rows go in and come out, rounded once, and backward
computes the gate once more from the rows that went in, which keeps less than the gate's own steps would.

S rows, F ffn.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_fsdpturbo.ops.functional import swiglu
from hf_fsdpturbo.ops.table import OPS, get_ops
from hf_fsdpturbo.sharding.expert_parallel import is_plain_swiglu

HALF = (torch.bfloat16, torch.float16)


class _InFloat32(torch.autograd.Function):
    """``gate(gate_up [S, 2F]) -> [S, F]`` in float32, in and out in their own dtype; a gate without parameters."""

    @staticmethod
    def forward(ctx: Any, gate_up_SF: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate_up_SF)
        ctx.gate = gate
        return gate(gate_up_SF.float()).to(gate_up_SF.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gate_up_SF,) = ctx.saved_tensors
        with torch.enable_grad():
            wide = gate_up_SF.float().requires_grad_()
            output = ctx.gate(wide)
        (found,) = torch.autograd.grad(output, wide, gradients[0].to(output.dtype))
        return found.to(gate_up_SF.dtype), None


def gate_in_float32(experts: nn.Module) -> None:
    """Let an experts module do so in half precision, unless it has no gate of its own, or parameters in it.

    A plain SwiGLU has an operator that does the same in one pass.

    Args:
        experts: of Transformers' layout: its forward calls ``_apply_gate``.
    """
    plain_swiglu = is_plain_swiglu(experts)
    gate = getattr(experts, "_apply_gate", None)
    if gate is None or any(True for child in experts.children() for _ in child.parameters()):
        return

    def apply(self: nn.Module, gate_up_SF: Tensor) -> Tensor:
        if gate_up_SF.dtype not in HALF:
            return cast(Tensor, gate(gate_up_SF))
        if plain_swiglu and gate_up_SF.device.type in OPS:
            return swiglu(gate_up_SF, get_ops(gate_up_SF.device.type))
        return cast(Tensor, _InFloat32.apply(gate_up_SF, gate))

    cast(Any, experts)._apply_gate = types.MethodType(apply, experts)
