"""Batches that cp ranks share: who reads what, and every token counted once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from hf_fsdpturbo.ranks import rank

# Note [What data ranks read]
# Of a map-style data set a rank reads its own samples; accelerate lets it walk the index batches of all ranks, 0.3 to
# 0.5 us each (0.3 to 0.5 ms a batch at 1,024 ranks): left as it is. Of a stream there is no own share to walk to: who
# reads it reads the samples of all ranks, which at many ranks is what a step waits for. Only files can be shared out,
# and then each rank's samples are others than one process would give it.
MANY_READERS = 8  # data ranks; below that a stream is seldom what a step waits for


class WholeStream(IterableDataset):
    """A ``datasets.IterableDataset`` whose shards accelerate does not see.

    It would give each data rank files of its own, which hold different numbers of samples: a rank that runs out leaves
    the others waiting. Of a plain stream every rank reads all and keeps its share, as many batches as the others.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Shuffles anew, where the dataset does."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class SharedBatches:
    """What a trainer counts differently when ``cp_size`` ranks hold the same batch; at 1 nothing changes.

    Args:
        cp_size: ranks that share a batch.
        data_ranks: ranks that do not.
    """

    def __init__(self, cp_size: int, data_ranks: int = 1) -> None:
        self.cp_size = cp_size
        self.data_ranks = data_ranks
        self._said: set[str] = set()

    def stream(self, dataset: Any, dispatch: bool | None = None) -> Any:
        """The data set as the data loader may read it; rank 0 says once what a stream costs at many ranks.

        ``dispatch`` is accelerate's ``dispatch_batches``.
        """
        cost = self.cost_of_stream(dataset, dispatch)
        if cost is not None and cost not in self._said and rank() == 0:
            self._said.add(cost)
            print(f"[hf_fsdpturbo] {cost}", flush=True)
        shared = self.cp_size > 1 and isinstance(dataset, IterableDataset) and hasattr(dataset, "n_shards")
        return WholeStream(dataset) if shared else dataset

    def cost_of_stream(self, dataset: Any, dispatch: bool | None) -> str | None:
        """What reading a stream costs from ``MANY_READERS`` on, with the fix; None where a rank reads its own share.

        See Note [What data ranks read]. ``dispatch`` None is accelerate's default, which dispatches streams.
        """
        ranks = self.data_ranks
        if not isinstance(dataset, IterableDataset) or ranks < MANY_READERS:
            return None
        fix = "Use a map-style data set"
        if self.cp_size == 1:
            if dispatch is False and getattr(dataset, "n_shards", 0) >= ranks:
                return None  # accelerate gives each rank files of its own
            fix += f", or a datasets.IterableDataset of {ranks} or more equal shards with dispatch_batches=False"
        who = f"each of {ranks} data ranks" if dispatch is False else "rank 0"
        sends = "" if dispatch is False else ", and sends them all to every rank"
        return f"iterable data set: {who} reads {ranks} batches for each one that a rank trains on{sends}. {fix}."

    def items(self, items: Any, summed: bool) -> Any:
        """Tokens of a step: Transformers divides by the ranks of one batch also where it has summed over none."""
        return items * self.cp_size if isinstance(items, Tensor) and not summed else items

    def tokens_seen(self, before: int, after: int) -> int:
        """A running count of tokens to which all ranks of a batch have added theirs."""
        return before + (after - before) // self.cp_size
