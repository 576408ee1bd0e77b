"""The field's convention, and how a module that has another one is brought to it.

``experts(hidden_states [T, D], top_k_index [T, K], top_k_weights [T, K]) -> [T, D]``: each row's experts on it, times
their weights, summed. Before sharding that is all experts in one process; after it the same call sends rows to the
ranks that hold their experts. What a module holds is said by attributes, which ``expert_stacks.py`` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
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
        "is_transposed": is_transposed,
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
    cast(Any, block).calls_by_convention = True
    block.forward = MethodType(forward, block)  # type: ignore[method-assign]


def grouped_swiglu(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """A forward for :func:`adapt_experts`: ``down(act(gate(x)) * up(x))`` by the grouped matmuls of Transformers.

    For ``gate_up_proj [E, 2F, D]`` with the gate rows first and ``down_proj [E, D, F]`` (transposed: ``[E, D, 2F]``,
    ``[E, F, D]``), and ``act_fn``, without biases.
    """
    from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward

    experts.has_gate, experts.has_bias, experts.is_concatenated = True, False, True
    experts.has_post_expert_norm, experts._is_expert_parallel = False, False
    experts._apply_gate = MethodType(_default_apply_gate, experts)
    output: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return output
