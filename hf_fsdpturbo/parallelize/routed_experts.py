"""Where sharding and dispatch meet: the forward that replaces an experts module's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hf_fsdpturbo.dispatch.dispatcher import Dispatcher, get_dispatcher
from hf_fsdpturbo.dispatch.recompute import current_tape
from hf_fsdpturbo.expert_stacks import called_by
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.parallelize.aligned_stacks import aligner
from hf_fsdpturbo.sharding.adapted_experts import AdaptedExperts
from hf_fsdpturbo.sharding.expert_fsdp import fully_shard_experts
from hf_fsdpturbo.sharding.expert_gate import gate_in_float32
from hf_fsdpturbo.sharding.expert_lora import base_module, wrapper_chain
from hf_fsdpturbo.sharding.expert_parallel import ModuleExperts, shard_experts, shared_by_experts
from hf_fsdpturbo.sharding.packed_experts import PackedExperts, has_packed_experts


class RoutedForward:
    """Callable put in place of ``experts.forward``: same arguments, experts anywhere in the ep group.

    Args:
        experts: the local block.
        dispatcher: brings rows to experts and back.
        name: of the experts module, for messages.
    """

    def __init__(self, experts: ModuleExperts, dispatcher: Dispatcher, name: str = "experts") -> None:
        self.experts = experts
        self.dispatcher = dispatcher
        self.name = name

    def __call__(
        self, hidden_states: Tensor, top_k_index: Any = None, top_k_weights: Any = None, *rest: Any, **others: Any
    ) -> Tensor:
        """``hidden_states [..., D], top_k_index [T, K], top_k_weights [T, K]`` -> shape and dtype of the first.

        Raises:
            ValueError: it is called with anything else, which the model's own code decides: alike on all ranks.
        """
        rows_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        self._check_routing(rows_TD.shape[0], top_k_index, top_k_weights, (*rest, *others))
        choices = top_k_index.numel() // rows_TD.shape[0] if rows_TD.shape[0] else 1  # a rank may have no row to send
        index_TK = top_k_index.reshape(-1, choices)
        weights_TK = top_k_weights.reshape(-1, choices)
        # Autocast reaches no grouped matmul: rows and weights have one dtype here, and all in it is said explicitly.
        with torch.autocast(rows_TD.device.type, enabled=False):
            as_is = self.dispatcher.takes_float32 and rows_TD.dtype == torch.float32
            sent_TD = rows_TD if as_is else rows_TD.to(self.experts.compute_dtype)
            try:
                # recompute runs the call anew, and saves nothing now
                opened_TD = self.experts.open(sent_TD, torch.is_grad_enabled() and current_tape() is None)
                output_TD = self.dispatcher(opened_TD, index_TK, weights_TK, self.experts)
                output_TD = self.experts.close(output_TD).to(rows_TD.dtype)
            finally:
                self.experts.leave()
        if hidden_states.ndim == 2:
            return output_TD
        # Never a view: a model may add shared experts in place, and that drops FSDP's backward hook from a view.
        return output_TD.view(hidden_states.shape).clone()

    def _check_routing(self, tokens: int, index: Any, weights: Any, others: tuple[Any, ...]) -> None:
        if isinstance(index, Tensor) and isinstance(weights, Tensor) and not others:
            are_routing = not index.is_floating_point() and weights.is_floating_point()
            if are_routing and index.numel() == weights.numel() and index.numel() % max(tokens, 1) == 0:
                return
        given = ", ".join(map(_in_words, (index, weights, *others)))
        raise ValueError(
            f"{self.name}: called with {tokens} rows and ({given}), but experts take (hidden_states [T, D], "
            "top_k_index [T, K], top_k_weights [T, K]). Register the family with a prepare_fn that makes the block "
            "that calls them do so (docs/register.md)."
        )


def _in_words(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:40]


def expert_options(options: dict[str, Any]) -> dict[str, Any]:
    """``fully_shard`` arguments for experts: those of the outer units, but inputs keep their dtypes.

    Routing weights may be float32 beside bf16 rows.
    """
    policy = options["mp_policy"]
    own = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
    return {**options, "mp_policy": own}


def route_experts(
    module: nn.Module,
    num_experts: int,
    dispatcher: str,
    state: FSDPTurboParallelState,
    options: dict[str, Any],
    name: str = "experts",
) -> ModuleExperts:
    """EP, dispatcher and EFSDP of one experts module; ``options`` are those of the outer units.

    ``name`` is the module's, for messages.
    """
    topology = state.topology
    view = AdaptedExperts if wrapper_chain(module) else ModuleExperts
    packed = has_packed_experts(base_module(module))
    view = PackedExperts if packed else view
    experts = shard_experts(module, state.ep_mesh, num_experts, view)
    group = state.ep_mesh.get_group() if topology.ep_size > 1 else None
    if getattr(base_module(module), "has_unused_experts", False):
        experts.align = aligner(num_experts, group)
    if options["mp_policy"].param_dtype is not None and experts.compute_dtype == torch.float32:
        gate_in_float32(base_module(module))
    if isinstance(experts, PackedExperts):
        experts.compute_as = options["mp_policy"].param_dtype
    brings = get_dispatcher(dispatcher)(group, num_experts, state.ep_nodes)
    setattr(module, called_by(module), RoutedForward(experts, brings, name))
    fully_shard_experts(
        module,
        state.expert_fsdp_mesh,
        num_local_experts=experts.num_local_experts,
        divide_factor=topology.dp_size * topology.cp_size,
        options=expert_options(options),
        experts=None if wrapper_chain(module) or packed else experts,
        shared=shared_by_experts(module),
    )
    return experts
