"""Batches that cp ranks share: who reads what, and every token counted once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset


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
    """What a trainer counts differently when ``cp_size`` ranks hold the same batch; at 1 nothing changes."""

    def __init__(self, cp_size: int) -> None:
        self.cp_size = cp_size

    def stream(self, dataset: Any) -> Any:
        """The data set as the data loader may read it."""
        shared = self.cp_size > 1 and isinstance(dataset, IterableDataset) and hasattr(dataset, "n_shards")
        return WholeStream(dataset) if shared else dataset

    def items(self, items: Any, summed: bool) -> Any:
        """Tokens of a step: Transformers divides by the ranks of one batch also where it has summed over none."""
        return items * self.cp_size if isinstance(items, Tensor) and not summed else items

    def tokens_seen(self, before: int, after: int) -> int:
        """A running count of tokens to which all ranks of a batch have added theirs."""
        return before + (after - before) // self.cp_size
