"""What a dispatcher is: two methods and a frozen record between them, and the table of those that exist.

T tokens, K top-k, S (token, expert) pairs that reached this rank, R rows that reached it, D hidden, F ffn, L local
experts.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class LocalExperts(Protocol):
    """The experts that live on this rank, as a dispatcher sees them."""

    num_local_experts: int
    is_plain_swiglu: bool
    """gate_up_proj [L, 2F, D] with the gate rows first, down_proj [L, D, F], SiLU, no bias, nothing after."""

    def weights(self) -> tuple[Tensor, Tensor]:
        """``(gate_up [L, 2F, D], down [L, D, F])`` as plain tensors whose gradients reach the parameters."""

    def forward_rows(self, rows_SD: Tensor, local_expert_S: Tensor, weight_S: Tensor | None) -> Tensor:
        """The module's own forward on rows that each go to one local expert; ``[S, D]`` in row order.

        Every weight takes part in the graph even when S is 0, so that gradient reductions stay collective.
        """


@dataclass(frozen=True)
class ReceivedRows:
    """Rows for this rank's experts; pair s takes row ``pair_row[s]`` to ``pair_expert[s]``, times ``pair_weight[s]``.

    ``pair_row`` None means one pair a row, in order; ``pair_weight`` None means weight 1 (applied where the token
    lives).
    """

    rows_RD: Tensor
    pair_expert_S: Tensor
    pair_row_S: Tensor | None = None
    pair_weight_S: Tensor | None = None


class Dispatcher(ABC):
    """Brings each token to the ranks that hold its experts and the results back, with exact gradients.

    Experts are numbered globally; expert ``e`` lives on rank ``e // num_local_experts`` of the group. All ranks of the
    group call it together, also with zero tokens; nothing is dropped.

    Args:
        group: process group of the ep axis; None or a group of one communicates nothing.
        num_experts: number of experts over the whole group.
    """

    def __init__(self, group: ProcessGroup | None, num_experts: int) -> None:
        self.group = group
        self.num_experts = num_experts
        self.group_size = 1 if group is None else torch.distributed.get_world_size(group)
        self.num_local_experts = num_experts // self.group_size

    def check_call(self, top_k: int, dtype: torch.dtype, experts: LocalExperts) -> None:
        """Raise ValueError, on all ranks alike, where this dispatcher cannot take such a call; most take any."""
        return

    @abstractmethod
    def dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> tuple[ReceivedRows, Any]:
        """Send ``hidden_states [T, D]`` to the owners of ``top_k_index [T, K]``: rows, and a record to combine."""

    @abstractmethod
    def combine(self, expert_output: Tensor, record: Any) -> Tensor:
        """Bring ``expert_output [R, D]`` back and sum it into ``[T, D]``."""

    def run(self, received: ReceivedRows, experts: LocalExperts) -> Tensor:
        """Local experts on the received rows: ``[R, D]``."""
        if received.pair_row_S is None:
            return experts.forward_rows(received.rows_RD, received.pair_expert_S, received.pair_weight_S)
        pairs_SD = received.rows_RD.index_select(0, received.pair_row_S)
        output_SD = experts.forward_rows(pairs_SD, received.pair_expert_S, received.pair_weight_S)
        return torch.zeros_like(received.rows_RD).index_add(0, received.pair_row_S, output_SD)

    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: LocalExperts
    ) -> Tensor:
        """``hidden_states [T, D], top_k_index [T, K], top_k_weights [T, K]`` -> ``[T, D]`` in the first's dtype."""
        received, record = self.dispatch(hidden_states, top_k_index, top_k_weights)
        return self.combine(self.run(received, experts), record)


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
