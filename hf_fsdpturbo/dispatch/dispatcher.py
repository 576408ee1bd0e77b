"""What a dispatcher is: one call, and the table of those that exist.

T tokens, K top-k, S (token, expert) pairs that reached this rank, D hidden, F ffn, L local experts.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_fsdpturbo.node_groups import NodeGroups


class LocalExperts(Protocol):
    """The experts that live on this rank, as a dispatcher sees them."""

    num_local_experts: int
    is_plain_swiglu: bool
    """gate_up_proj [L, 2F, D] with the gate rows first, down_proj [L, D, F], SiLU, no bias, nothing after."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the weights, and of the rows that travel."""

    def weights(self) -> tuple[Tensor, Tensor]:
        """``(gate_up [L, 2F, D], down [L, D, F])`` as plain tensors whose gradients reach the parameters."""

    def forward_rows(self, rows_SD: Tensor, local_expert_S: Tensor, weight_S: Tensor | None) -> Tensor:
        """The module's own forward on rows that each go to one local expert; ``[S, D]`` in row order.

        Every weight takes part in the graph even when S is 0, so that gradient reductions stay collective.
        """


class Dispatcher(ABC):
    """Brings each token to the ranks that hold its experts and the results back, with exact gradients.

    Experts are numbered globally; expert ``e`` lives on rank ``e // num_local_experts`` of the group. All ranks of the
    group call it together, also with zero tokens; nothing is dropped.

    Args:
        group: process group of the ep axis; None or a group of one communicates nothing.
        num_experts: number of experts over the whole group.
        nodes: the nodes that the group spans, None where all its ranks are near each other. What a dispatcher computes
            does not depend on it; one that knows no nodes takes no notice.

    Attributes:
        takes_float32: whether it takes float32 rows for experts in half precision, rounds them once on their way there
            and gives float32 back; others are handed rows in the experts' dtype.
    """

    takes_float32: bool = False

    def __init__(self, group: ProcessGroup | None, num_experts: int, nodes: NodeGroups | None = None) -> None:
        self.group = group
        self.nodes = nodes
        self.num_experts = num_experts
        self.group_size = 1 if group is None else torch.distributed.get_world_size(group)
        self.num_local_experts = num_experts // self.group_size

    def check_call(self, top_k: int, dtype: torch.dtype, experts: LocalExperts) -> None:
        """Raise ValueError, on all ranks alike, where this dispatcher cannot take such a call; most take any."""
        return

    @abstractmethod
    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: LocalExperts
    ) -> Tensor:
        """Each token's experts on it, times their routing weights, summed: ``[T, D]`` in ``hidden_states``' dtype.

        Gradients reach ``hidden_states``, ``top_k_weights`` and the experts' parameters on every rank, where no token
        arrived too.

        Args:
            hidden_states: ``[T, D]``, this rank's tokens; T may be 0 and differ between ranks.
            top_k_index: ``[T, K]``, the experts of each token, numbered over the group.
            top_k_weights: ``[T, K]``, their routing weights.
            experts: those that live on this rank.

        Raises:
            ValueError: what :meth:`check_call` refuses, where this dispatcher refuses anything.
        """


# Dispatcher name -> "module:class". Names are checked against arguments.DISPATCHER_NAMES by a test; "auto" times the
# others on the first step and stands for the fastest.
DISPATCHERS: dict[str, str] = {
    "eager": "hf_fsdpturbo.dispatch.eager:EagerDispatcher",
    "fused": "hf_fsdpturbo.dispatch.fused:FusedDispatcher",
    "mc2": "hf_fsdpturbo.dispatch.mc2:Mc2Dispatcher",
    "domino": "hf_fsdpturbo.dispatch.domino:DominoDispatcher",
    "auto": "hf_fsdpturbo.dispatch.auto:AutoDispatcher",
}


def get_dispatcher(name: str) -> type[Dispatcher]:
    """The dispatcher class of that name.

    Raises:
        ValueError: no dispatcher has that name; the message lists those that exist.
    """
    if name not in DISPATCHERS:
        raise ValueError(f"ep_dispatcher={name!r} is not available. Choose one of {sorted(DISPATCHERS)}.")
    module, _, attribute = DISPATCHERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
