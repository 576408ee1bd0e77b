"""Batches that cp ranks share: who reads what, and every token counted once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset

from hf_fsdpturbo.ranks import rank
from hf_fsdpturbo.trainer.evaluation import GatheredRows

# Note [What data ranks read]
# Of a map-style data set a rank reads its own samples; accelerate lets it walk the index batches of all ranks, 0.3 to
# 0.5 us each (0.3 to 0.5 ms a batch at 1,024 ranks): left as it is. Of a stream there is no own share to walk to: who
# reads it reads the samples of all ranks, which at many ranks is what a step waits for. Only files can be shared out,
# and then each rank's samples are others than one process would give it.
MANY_READERS = 8  # data ranks; below that a stream is seldom what a step waits for


class WholeStream(IterableDataset):
    """An iterable data set, of which every rank reads all and keeps its share, as many batches as the others.

    accelerate does not see the shards of a ``datasets.IterableDataset`` in it: it would give each data rank files of
    its own, which hold different numbers of samples, and a rank that runs out leaves the others waiting.

    Attributes:
        total: samples of the last pass that came to its end in this process; None before.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.total: int | None = None

    def __iter__(self) -> Iterator[Any]:
        number, self.total = 0, None
        for sample in self.dataset:
            number += 1
            yield sample
        self.total = number

    def __len__(self) -> int:
        return len(self.dataset)  # TypeError where it has none, which is what is asked for

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

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

    def copy_beside(self, accelerator: Any, args: Any) -> None:
        """Batches in pinned memory go to a CUDA device without the host waiting for it: see ``batches_ahead.py``."""
        if args.device.type == "cuda" and args.dataloader_pin_memory:
            accelerator.dataloader_config.non_blocking = True

    def read_on_every_rank(self, accelerator: Any, mesh: DeviceMesh) -> None:
        """Each rank reads its batches, and those that share one the same: its loader looks at the mesh's axis names.

        accelerate's ``dispatch_batches`` becomes False where nothing is given: see :meth:`cost_of_stream`.
        """
        accelerator.state.device_mesh, config = mesh, accelerator.dataloader_config
        if config.dispatch_batches is None:
            config.dispatch_batches = False

    def stream(self, dataset: Any, dispatch: bool | None = None) -> Any:
        """The data set as the data loader may read it; rank 0 says once what a stream costs at many ranks.

        ``dispatch`` is accelerate's ``dispatch_batches``.
        """
        cost = self.cost_of_stream(dataset, dispatch)
        if cost is not None and cost not in self._said and rank() == 0:
            self._said.add(cost)
            print(f"[hf_fsdpturbo] {cost}", flush=True)
        whole = self.cp_size * self.data_ranks > 1 and isinstance(dataset, IterableDataset) and not dispatch
        return WholeStream(dataset) if whole and not self._own_files(dataset, dispatch) else dataset

    def _own_files(self, dataset: Any, dispatch: bool | None) -> bool:
        """Asked for at many ranks: accelerate gives each rank files of its own, which must hold as many samples."""
        many = self.cp_size == 1 and self.data_ranks >= MANY_READERS
        return many and dispatch is False and getattr(dataset, "n_shards", 0) >= self.data_ranks

    def cost_of_stream(self, dataset: Any, dispatch: bool | None) -> str | None:
        """What reading a stream costs from ``MANY_READERS`` on, with the fix; None where a rank reads its own share.

        See Note [What data ranks read]. ``dispatch`` None reads on every rank here (accelerate's default, dispatching,
        cannot join batches of different lengths); False lets ranks have files of their own.
        """
        ranks = self.data_ranks
        if not isinstance(dataset, IterableDataset) or ranks < MANY_READERS:
            return None
        fix = "Use a map-style data set"
        if self.cp_size == 1:
            if self._own_files(dataset, dispatch):
                return None
            fix += f", or a datasets.IterableDataset of {ranks} or more equal shards with dispatch_batches=False"
        who = "rank 0" if dispatch else f"each of {ranks} data ranks"
        sends = ", and sends them all to every rank" if dispatch else ""
        return f"iterable data set: {who} reads {ranks} batches for each one that a rank trains on{sends}. {fix}."

    def items(self, items: Any, summed: bool, rows: GatheredRows | None) -> Any:
        """Tokens of a step: Transformers divides by the ranks of one batch also where it has summed over none.

        Where it has, ``rows`` makes them those of one process, None in a run of one.
        """
        if not isinstance(items, Tensor):
            return items
        if not summed:
            return items * self.cp_size
        return items if rows is None else rows.items_of_one_process(items)

    def tokens_seen(self, before: int, after: int) -> int:
        """A running count of tokens to which all ranks of a batch have added theirs."""
        return before + (after - before) // self.cp_size
