"""The field's convention, and how a module that has another one is brought to it.

``experts(hidden_states [T, D], top_k_index [T, K], top_k_weights [T, K]) -> [T, D]``: each row's experts on it, times
their weights, summed. Before sharding that is all experts in one process; after it the same call sends rows to the
ranks that hold their experts. What a module holds is said by attributes, which ``expert_stacks.py`` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any, cast

from torch import Tensor, nn

RowsForward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def adapt_experts(
    module: nn.Module,
    forward: RowsForward,
    *,
    num_experts: int,
    stacks: tuple[str, ...] | None = None,
    rows_per_expert: int = 1,
    has_unused_experts: bool = False,
    is_transposed: bool = False,
) -> None:
    """Say what an experts module holds, and how its experts are computed. A second call does nothing.

    Args:
        module: named by ``ep_modules``.
        forward: ``forward(module, hidden_states, top_k_index, top_k_weights)`` in the field's convention. Once the
            model is sharded it is called with the rows, the experts (numbered from 0) and the stacks of one rank, so
            it must read sizes from the stacks or from ``module.num_experts``, not from the config.
        num_experts: all experts.
        stacks: dotted names, below the module, of the parameters that are stacked over experts. None: the module's
            own parameters, and ``module(...)`` is then called by the convention. Where they are given, the other
            parameters below the module are dense, and the call is ``module.experts_forward(...)``: the module's own
            forward (see :func:`adapt_block`) makes it.
        rows_per_expert: rows of dim 0 that belong to one expert, for stacks that were flattened.
        has_unused_experts: whether a stack may go on after the last expert with rows that nothing reads.
        is_transposed: whether matrices are ``[E, in, out]``.
    """
    if "expert_stacks" in vars(module):
        return
    own = tuple(name for name, _ in module.named_parameters(recurse=False))
    said: dict[str, Any] = {
        "expert_stacks": own if stacks is None else stacks,
        "num_experts": num_experts,
        "rows_per_expert": rows_per_expert,
        "has_unused_experts": has_unused_experts,
        "stacks_are_transposed": is_transposed,  # PEFT reads is_transposed, and lays factors out by it
        "forward" if stacks is None else "experts_forward": MethodType(forward, module),
    }
    for name, value in said.items():
        setattr(module, name, value)


def adapt_block(block: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of the module that calls the experts: ``forward(block, ...)``. A second call does nothing.

    It must route with the same numbers and gradients as the family's own code; routers stay modules that are called.
    """
    if "calls_by_convention" in vars(block):
        return
    for name, value in {"calls_by_convention": True, "forward": MethodType(forward, block)}.items():
        setattr(block, name, value)


def grouped_swiglu(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    gate_up: Tensor,
    down: Tensor,
    act_fn: Callable[[Tensor], Tensor],
    is_transposed: bool = False,
) -> Tensor:
    """``down(act(gate(x)) * up(x))`` of each row's experts, weighted and summed, by Transformers' grouped matmuls.

    Args:
        hidden_states: ``[T, D]``.
        top_k_index: ``[T, K]``, below the number of experts in the stacks.
        top_k_weights: ``[T, K]``.
        gate_up: ``[E, 2F, D]``, gate rows first; transposed ``[E, D, 2F]``.
        down: ``[E, D, F]``; transposed ``[E, F, D]``.
        act_fn: on the gate.
        is_transposed: whether the stacks are.

    Returns:
        ``[T, D]`` in the dtype of ``hidden_states``.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    def apply_gate(gate_up_SF: Tensor) -> Tensor:
        gate_SF, up_SF = gate_up_SF.chunk(2, dim=-1)
        return act_fn(gate_SF) * up_SF

    kind = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False, "_is_expert_parallel": False}
    stacks = {"gate_up_proj": gate_up, "down_proj": down, "num_experts": gate_up.shape[0]}
    experts = SimpleNamespace(**kind, **stacks, is_transposed=is_transposed, _apply_gate=apply_gate)
    output: Tensor = grouped_mm_experts_forward(cast(Any, experts), hidden_states, top_k_index, top_k_weights)
    return output
