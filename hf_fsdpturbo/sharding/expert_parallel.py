"""Experts over the ep axis: each rank keeps a contiguous block of experts and a view of it that dispatchers run.

S rows, L local experts, E all experts, D hidden, F ffn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_fsdpturbo.sharding.expert_bias import summed_in_float32
from hf_fsdpturbo.sharding.expert_lora import base_module
from hf_fsdpturbo.shards import local_tensor


class _TouchWeights(torch.autograd.Function):
    """Ties weights to an output that does not use them, with zero gradients: see Note [Ranks without tokens]."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        zeros = (torch.zeros_like(w) if need else None for w, need in zip(ctx.saved_tensors, needed, strict=True))
        return gradients[0], *zeros


class _DivideGradient(torch.autograd.Function):
    """The weight itself; its gradient divided: see Note [Experts that one rank holds whole] in expert_fsdp.py."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] / ctx.divisor, None


# Note [Ranks without tokens]
# A rank that received no rows must still produce (zero) gradients for its experts: FSDP starts the reduce-scatter of a
# unit from the gradients of its parameters, and a rank that has none would leave the others waiting. The output is
# tied to the weights as well, so that the exchange of gradients in backward runs here even if the rows need none.


class ModuleExperts:
    """The local block of one experts module, as ``dispatch.LocalExperts``; built by :func:`shard_experts`.

    Args:
        module: experts module of Transformers' layout; its parameters may be plain or DTensors on ep.
        forward: the forward it had before ours, called as ``forward(rows, local_index [S, 1], weight [S, 1])``.

    Attributes:
        gradient_divisor: what this view divides gradients by; None where FSDP does it.
    """

    gradient_divisor: int | None = None

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], num_local_experts: int) -> None:
        self.module = module
        self.module_forward = forward
        self.num_local_experts = num_local_experts
        self.is_plain_swiglu = is_plain_swiglu(module)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the stacked matrices as they are now: inside a forward, the one that experts compute in."""
        return next(p.dtype for p in self.module.parameters(recurse=False) if p.ndim > 1)

    def local_parameters(self) -> dict[str, Tensor]:
        """Parameters of the module itself as local tensors, gradients flowing to the DTensors."""
        local = {name: local_tensor(p) for name, p in self.module.named_parameters(recurse=False)}
        if self.gradient_divisor is None:
            return local
        return {name: _DivideGradient.apply(weight, self.gradient_divisor) for name, weight in local.items()}

    def weights(self) -> tuple[Tensor, Tensor]:
        """``(gate_up [L, 2F, D], down [L, D, F])``; only for plain SwiGLU experts."""
        local = self.local_parameters()
        return local["gate_up_proj"], local["down_proj"]

    def forward_rows(self, rows_SD: Tensor, local_expert_S: Tensor, weight_S: Tensor | None) -> Tensor:
        """The module's own forward with local experts only; ``[S, D]``."""
        local = self.local_parameters()
        if rows_SD.shape[0] == 0:
            return _TouchWeights.apply(rows_SD, *local.values())
        weight_S1 = torch.ones_like(local_expert_S, dtype=rows_SD.dtype) if weight_S is None else weight_S
        with self._parameters_replaced(summed_in_float32(local)):
            return self.module_forward(rows_SD, local_expert_S.unsqueeze(-1), weight_S1.unsqueeze(-1))

    @contextlib.contextmanager
    def _parameters_replaced(self, local: dict[str, Tensor]) -> Iterator[None]:
        """The module's code reads ``self.gate_up_proj``: show it local tensors for the length of one call."""
        own = dict(self.module._parameters)
        self.module._parameters.update(local)  # type: ignore[arg-type]
        try:
            yield
        finally:
            self.module._parameters.update(own)


def is_plain_swiglu(module: nn.Module) -> bool:
    """Whether the experts compute ``down(silu(gate(x)) * up(x))`` and nothing else.

    That is from ``gate_up_proj [E, 2F, D]``, gate rows first, and ``down_proj [E, D, F]``.
    """
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    flags = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    return (
        all(getattr(module, flag, None) is value for flag, value in flags.items())
        and getattr(module, "has_post_expert_norm", False) is False
        and {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}
        and isinstance(getattr(module, "act_fn", None), (SiLUActivation, nn.SiLU))
        and getattr(type(module), "_apply_gate", None) is _default_apply_gate
    )


def check_experts(module: nn.Module, name: str, ep_size: int) -> int:
    """Number of experts of a module, checked against ep_size.

    Raises:
        ValueError: the parameters are not stacked one expert a row of dim 0, or ep_size does not divide their number.
    """
    shared = shared_by_experts(module)
    parameters = {n: p for n, p in module.named_parameters() if p not in shared}
    sizes = {n: p.shape[0] if p.ndim else 0 for n, p in parameters.items()}
    num_experts = getattr(module, "num_experts", None) or max(sizes.values(), default=0)
    odd = {n: tuple(parameters[n].shape) for n, size in sizes.items() if size != num_experts}
    if not sizes or odd and ep_size > 1:
        raise ValueError(
            f"{name}: expert parallelism needs parameters stacked over {num_experts} experts in dim 0, but found "
            f"{odd or 'no parameters'}. Train this model with ep_size=1."
        )
    if num_experts % ep_size:
        raise ValueError(
            f"ep_size ({ep_size}) must divide the number of experts ({num_experts}) of {name}. Choose an ep_size that "
            "divides both dp_size and the number of experts."
        )
    return num_experts


def shared_by_experts(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of modules inside an experts module (a norm after each expert): one for all experts, never stacked.

    Every rank keeps them whole. Each has the gradient of the rows that it received, so that their average over all
    ranks is the gradient, as for dense parameters.
    """
    return {parameter for child in base_module(module).children() for parameter in child.parameters()}


def shard_experts(
    module: nn.Module, ep_mesh: DeviceMesh, num_experts: int, view: type[ModuleExperts] = ModuleExperts
) -> ModuleExperts:
    """Keep this rank's block of experts: parameters become ``DTensor Shard(0)`` on ep, trainable as they were.

    A whole (or meta) tensor is expected on every rank; each takes its own slice, nothing is communicated. What all
    experts share stays as it is. The module may be wrapped by adapters whose factors are stored expert first; ``view``
    is then ``AdaptedExperts``.
    """
    shared = shared_by_experts(module)
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter in shared:
                continue
            local = distribute_tensor(parameter.detach(), ep_mesh, [Shard(0)], src_data_rank=None)
            setattr(owner, name, nn.Parameter(local, requires_grad=parameter.requires_grad))
    num_local_experts = num_experts // ep_mesh.size()
    experts = base_module(module)
    cast(Any, experts).num_experts = num_local_experts  # the forward of Transformers sizes its histograms with it
    return view(module, experts.forward, num_local_experts)
