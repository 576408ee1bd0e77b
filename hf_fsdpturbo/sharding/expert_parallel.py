"""Experts over the ep axis: each rank keeps a contiguous block of experts and a view of it that dispatchers run.

S rows, L local experts, E all experts, D hidden, F ffn.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_fsdpturbo.expert_stacks import called_by, fits, shared_parameters, stack_names
from hf_fsdpturbo.ops.weight_copies import WeightCopies
from hf_fsdpturbo.quantised.packed_weight import is_statistic
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
        compute_in: what this view converts weights to; None where FSDP does it, or nothing is to be done.
        copies: where converted weights are kept.
        align: what makes of the local stacks those of the local experts, where they are not the same: collective.
    """

    gradient_divisor: int | None = None
    compute_in: torch.dtype | None = None
    align: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], num_local_experts: int) -> None:
        self.module = module
        self.module_forward = forward
        self.num_local_experts = num_local_experts
        self.is_plain_swiglu = is_plain_swiglu(module)
        self.copies = WeightCopies()

    def open(self, rows: Tensor, until_backward: bool) -> Tensor:
        """The rows of one call, which begins; ``until_backward`` as :class:`quantised.fleeting.Fleeting` has it."""
        return rows

    def close(self, output: Tensor) -> Tensor:
        """The output of the call."""
        return output

    def leave(self) -> None:
        """The call is over, by its end or by an exception."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the stacked matrices as they are now: inside a forward, the one that experts compute in."""
        if self.compute_in is not None:
            return self.compute_in
        stacks = (self.module.get_parameter(name) for name in stack_names(self.module))
        return next(p.dtype for p in stacks if p.ndim > 1)

    def local_parameters(self) -> dict[str, Tensor]:
        """The stacks as local tensors by name, gradients flowing to the DTensors."""
        stored = {name: self.module.get_parameter(name) for name in stack_names(self.module)}
        if self.compute_in is not None:
            # without gradients (a reference model, evaluation) nothing stays, as FSDP would have it
            divisor, keep = self.gradient_divisor or 1, torch.is_grad_enabled()
            get = functools.partial(self.copies.get, dtype=self.compute_in, divisor=divisor, keep=keep)
            return {name: get(name, weight, mode=self.module.training) for name, weight in stored.items()}
        local = {name: local_tensor(weight) for name, weight in stored.items()}
        if self.gradient_divisor is None:
            return local
        return {name: _DivideGradient.apply(weight, self.gradient_divisor) for name, weight in local.items()}

    def aligned_parameters(self) -> dict[str, Tensor]:
        """As :meth:`local_parameters`, those of the local experts alone."""
        local = self.local_parameters()
        return local if self.align is None else self.align(local)

    def weights(self) -> tuple[Tensor, Tensor]:
        """``(gate_up [L, 2F, D], down [L, D, F])``; only for plain SwiGLU experts."""
        local = self.aligned_parameters()
        return local["gate_up_proj"], local["down_proj"]

    def forward_rows(self, rows_SD: Tensor, local_expert_S: Tensor, weight_S: Tensor | None) -> Tensor:
        """The module's own forward with local experts only; ``[S, D]``."""
        local = self.aligned_parameters()
        if rows_SD.shape[0] == 0:
            return _TouchWeights.apply(rows_SD, *local.values())
        weight_S1 = torch.ones_like(local_expert_S, dtype=rows_SD.dtype) if weight_S is None else weight_S
        with self._parameters_replaced(summed_in_float32(local)):
            return self.module_forward(rows_SD, local_expert_S.unsqueeze(-1), weight_S1.unsqueeze(-1))

    @contextlib.contextmanager
    def _parameters_replaced(self, local: dict[str, Tensor]) -> Iterator[None]:
        """The module's code reads ``self.gate_up_proj``: show it local tensors for the length of one call."""
        places = {name: self._place(name) for name in local}
        own = {name: owner[leaf] for name, (owner, leaf) in places.items()}
        for name, (owner, leaf) in places.items():
            owner[leaf] = local[name]
        try:
            yield
        finally:
            for name, (owner, leaf) in places.items():
                owner[leaf] = own[name]

    def _place(self, name: str) -> tuple[dict[str, Any], str]:
        path, _, leaf = name.rpartition(".")
        return cast("dict[str, Any]", self.module.get_submodule(path)._parameters), leaf


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
        and {name for name, _ in module.named_parameters() if not is_statistic(name)} == {"gate_up_proj", "down_proj"}
        and isinstance(getattr(module, "act_fn", None), (SiLUActivation, nn.SiLU))
        and getattr(type(module), "_apply_gate", None) is _default_apply_gate
    )


def check_experts(module: nn.Module, name: str, ep_size: int) -> int:
    """Number of experts of a module, checked against ep_size.

    Raises:
        ValueError: it is not called by the field's convention, its stacks are not one expert a row of dim 0, or
            ep_size does not divide their number.
    """
    experts = base_module(module)
    own = dict(experts.named_parameters())
    if lacking := [stack for stack in stack_names(experts) if stack not in own]:
        raise ValueError(
            f"{name}: its adapter names stacks {lacking}, but its parameters are {sorted(own)[:6]}. Name them in "
            "adapt_experts as they are (without adapters of LoRA round them)."
        )
    stacked = {n: p for n, p in module.named_parameters() if p not in shared_by_experts(module)}
    sizes = {n: p.shape[0] if p.ndim else 0 for n, p in stacked.items()}
    num_experts = getattr(experts, "num_experts", None) or max(sizes.values(), default=0)
    odd = {n: tuple(stacked[n].shape) for n, size in sizes.items() if not fits(experts, size, num_experts)}
    if not sizes or odd and ep_size > 1:
        raise ValueError(
            f"{name}: expert parallelism needs parameters stacked over {num_experts} experts in dim 0, but found "
            f"{odd or 'no parameters'}. Train this model with ep_size=1."
        )
    if num_experts % ep_size or any(size % ep_size for size in sizes.values() if ep_size > 1):
        uneven = {n: size for n, size in sizes.items() if size % ep_size} if num_experts % ep_size == 0 else {}
        raise ValueError(
            f"ep_size ({ep_size}) must divide the number of experts ({num_experts}) of {name}"
            f"{f', and the rows of {uneven}' if uneven else ''}. Choose an ep_size that divides both dp_size and the "
            "number of experts."
        )
    check_convention(experts, name)
    return num_experts


def check_convention(experts: nn.Module, name: str) -> None:
    """The call that is replaced must take rows and routing.

    Raises:
        ValueError: it takes something else; names layer, what it takes, rule, fix.
    """
    call = getattr(experts, called_by(experts))
    signature = inspect.signature(call)
    try:
        signature.bind(None, None, None)
    except TypeError:
        raise ValueError(
            f"{name}: its {called_by(experts)} takes {signature}, but experts are called with (hidden_states [T, D], "
            "top_k_index [T, K], top_k_weights [T, K]). Register the family with a prepare_fn that brings its experts "
            "to this convention (docs/register.md), or train with ep_size=1."
        ) from None


def shared_by_experts(module: nn.Module) -> set[nn.Parameter]:
    """Parameters below an experts module that are not stacked: a norm after each expert, one for all of them.

    Every rank keeps them whole. Each has the gradient of the rows that it received (or of its own tokens), so that
    their average over all ranks is the gradient, as for dense parameters.
    """
    return shared_parameters(base_module(module))


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
    return view(module, getattr(experts, called_by(experts)), num_local_experts)
