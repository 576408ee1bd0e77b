"""One all-reduce of one flat tensor brings what all ranks measured in a window to every rank.

    [ sums over ranks: counts, tokens, keys, entropy, bytes | rank 0's own values | rank 1's | ... ]

All are int64, so that sums are exact in any order; a rank leaves the others' places zero, which makes of the sum a
gather. Waiting for it is the only host sync.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_fsdpturbo.ranks import rank, world_size


def gather_window(summed: Sequence[Tensor], own: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Sum tensors over ranks and gather numbers from them. Collective; the ranks give as many of each.

    Args:
        summed: int64, one-dimensional, on the device of the process group.
        own: whole numbers of this rank.

    Returns:
        the sums, a list a tensor; and each rank's numbers, in rank order.
    """
    ranks = world_size()
    mine = torch.zeros(ranks, len(own), dtype=torch.int64)
    mine[rank()] = torch.tensor(list(own), dtype=torch.int64)
    device = summed[0].device
    flat = torch.cat([*summed, mine.flatten().to(device, non_blocking=True)])
    if dist.is_initialized() and ranks > 1:
        dist.all_reduce(flat)
    parts = flat.cpu().split([*(len(part) for part in summed), ranks * len(own)])
    return [part.tolist() for part in parts[:-1]], parts[-1].view(ranks, len(own)).tolist()
