"""What a trainer must do differently when cp ranks share a batch: count every token and every sample once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hf_fsdpturbo.context_parallel.sharded_head import install_sharded_head


class GatherOnce:
    """``accelerator.gather_for_metrics`` that returns the rows of each data rank once: cp ranks hold the same ones.

    It stands in for the method on the accelerator itself, so that every caller (evaluation, prediction, TRL's metrics)
    gets it. Copies are dropped before accelerate cuts the repeats of an uneven last batch, which it finds at the end.

    Args:
        accelerator: whose method it replaces.
        cp_size: ranks that share a batch, innermost.
    """

    def __init__(self, accelerator: Accelerator, cp_size: int) -> None:
        self.accelerator = accelerator
        self.cp_size = cp_size
        self.gather_for_metrics = accelerator.gather_for_metrics
        self.gather = accelerator.gather

    def __call__(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As accelerate's: tensors of one shape on all ranks, nested or not, or any objects."""
        if use_gather_object or not only_tensors(input_data):
            mine = self.accelerator.process_index % self.cp_size == 0
            return self.gather_for_metrics(input_data if mine else [], use_gather_object=True)
        before = self.accelerator.gather  # an evaluation in progress may have put its own there
        self.accelerator.gather = self._gather  # type: ignore[method-assign]
        try:
            return self.gather_for_metrics(input_data)
        finally:
            self.accelerator.gather = before  # type: ignore[method-assign]

    def _gather(self, data: Any) -> Any:
        from accelerate.utils import recursively_apply

        return recursively_apply(self._drop_copies, self.gather(data))

    def _drop_copies(self, rows: Tensor) -> Tensor:
        """``[world * n, ...]`` -> ``[dp * n, ...]``: of every cp_size blocks the first."""
        blocks = rows.unflatten(0, (self.accelerator.num_processes, -1))
        return blocks[:: self.cp_size].flatten(0, 1)


def only_tensors(data: Any) -> bool:
    """Whether nested data holds tensors and nothing else, so that it can be gathered without pickling."""
    if isinstance(data, dict):
        return all(only_tensors(x) for x in data.values())
    if isinstance(data, (list, tuple)):
        return all(only_tensors(x) for x in data)
    return isinstance(data, Tensor)


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


class ContextParallelHooks:
    """Overrides of ``transformers.Trainer``, for any trainer on top of it; they change nothing at ``cp_size`` 1.

    Expects ``self.parallel_state`` (None in a run of one process) before the trainer's ``__init__``.

    Set on the class or the trainer:

    Attributes:
        cp_sharded_loss: SFT only: run the LM head on each rank's slice instead of whole on every cp rank; same losses,
            metrics and gradients (see ``sharded_head.py``).
    """

    cp_sharded_loss: bool = False

    _head_is_cut: bool = False
    model: Any
    parallel_state: Any
    args: Any
    accelerator: Any
    state: Any

    @property
    def _cp_size(self) -> int:
        return 1 if self.parallel_state is None else self.parallel_state.topology.cp_size

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self._cp_size > 1:
            once = GatherOnce(self.accelerator, self._cp_size)
            self.accelerator.gather_for_metrics = once
            self.gather_function = functools.partial(once, use_gather_object=self.args.eval_use_gather_object)

    def get_tp_size(self) -> int:
        """Ranks that hold the same batch and the same loss: divides token counts, loss scale, total batch size."""
        return self._cp_size if self._cp_size > 1 else super().get_tp_size()  # type: ignore[misc]

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers divides by the ranks of one batch also where it has summed over none."""
        items = super()._get_num_items_in_batch(*args, **kwargs)  # type: ignore[misc]
        summed = self.args.average_tokens_across_devices
        return items * self._cp_size if isinstance(items, Tensor) and not summed else items

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> DataLoader:
        if self._cp_size > 1 and isinstance(dataset, IterableDataset) and hasattr(dataset, "n_shards"):
            dataset = WholeStream(dataset)
        return super()._get_dataloader(dataset, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Cuts the LM head at the first loss, if asked for: TRL makes its fused head in ``__init__``, after us."""
        if self.cp_sharded_loss and not self._head_is_cut:
            install_sharded_head(self.model)
            self._head_is_cut = True
        return super().compute_loss(model, *args, **kwargs)  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        counted = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + counted // self._cp_size
