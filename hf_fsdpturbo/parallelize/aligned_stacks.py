"""A stack with rows after its last expert, cut over ep like the others, holds other experts on a rank than they do.

E = 8 experts, two unused rows, two ep ranks:

    down_proj     [8, ..]    rank 0: 0 1 2 3      rank 1: 4 5 6 7
    gate_up_proj  [10, ..]   rank 0: 0 1 2 3 4    rank 1: 5 6 7 . .

So each layer's forward sends those rows (here row 4) to the rank that needs them, and backward their gradients back:
the parameter keeps its shape, which loading, checkpoints and plain Transformers know. The rows that travel are a share
of the layer's weights, and live from forward to backward unless activation checkpointing makes them again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_fsdpturbo.dispatch.row_exchange import all_to_all_rows


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> int:
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


def aligner(num_experts: int, group: ProcessGroup | None) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """A function from local stacks to those of the local experts; all ranks of ``group`` call it together.

    Args:
        num_experts: over the whole group.
        group: of the ep axis; None: one rank holds all.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    me = 0 if group is None else dist.get_rank(group)
    wanted = num_experts // ranks

    def aligned(stack: Tensor) -> Tensor:
        held = stack.shape[0]
        if held == wanted:
            return stack
        if group is None:
            return stack[:wanted]
        mine, needed = (me * held, (me + 1) * held), (me * wanted, (me + 1) * wanted)
        sent = [_overlap(mine, (rank * wanted, (rank + 1) * wanted)) for rank in range(ranks)]
        received = [_overlap(needed, (rank * held, (rank + 1) * held)) for rank in range(ranks)]
        return all_to_all_rows(stack[: sum(sent)], received, sent, group)

    return lambda local: {name: aligned(stack) for name, stack in local.items()}
