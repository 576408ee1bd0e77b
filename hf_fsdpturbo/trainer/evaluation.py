"""Gathered rows: each real sample counts once; the one owner of ``accelerator.gather`` and ``gather_for_metrics``.

Two kinds of copies leave what a trainer gathers. The cp ranks of a group hold the same batch. And all ranks need a
batch in every step of an evaluation, so accelerate fills an uneven last one with samples from the start of the data
set: it cuts them off after ``gather_for_metrics``, but TRL also gathers with ``gather``, and takes means over batches
in which real samples and repeats are mixed already.

B samples a rank, m rows a sample (2 where a batch is chosen and rejected), c real samples of this rank, W data ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import IterableDataset

from hf_fsdpturbo.images import PER_SAMPLE, images_of_first, is_of_images


class GatheredRows:
    """Stands in for both gather methods of an accelerator, from :meth:`install` on.

    ``gather_for_metrics`` returns each data rank's rows once; ``gather`` does so in evaluations, outside it is
    accelerate's own (token counts in training need all ranks).

    Args:
        accelerator: whose methods are replaced.
        cp_size: ranks that share a batch, innermost.
    """

    def __init__(self, accelerator: Accelerator, cp_size: int) -> None:
        self.accelerator = accelerator
        self.cp_size = cp_size
        self.scalars_are_means = False
        self.gather = accelerator.gather
        self.gather_for_metrics = accelerator.gather_for_metrics
        self.data_ranks = accelerator.num_processes // cp_size
        self.data_rank = accelerator.process_index // cp_size
        self.evaluating = False
        self.is_cut = False

    def install(self) -> None:
        """Put both methods on the accelerator, so that every caller (Trainer, TRL's metrics) has them."""
        self.accelerator.gather = self._gather  # type: ignore[method-assign]
        self.accelerator.gather_for_metrics = self._gather_for_metrics  # type: ignore[method-assign]

    @contextlib.contextmanager
    def evaluation(self, trainer: Any) -> Iterator[None]:
        """While open, repeats in an uneven last batch leave what ``trainer`` gathers.

        Its ``scalars_are_means``: a rank's scalar is the mean of its samples, and so comes once for each of them.
        """
        self.evaluating, self.scalars_are_means = True, trainer.scalars_are_means
        try:
            with undivided_aux_loss(trainer):
                yield
        finally:
            self.evaluating = False
            self.bind(trainer)

    def bind(self, trainer: Any) -> None:
        """As Trainer binds ``gather_function`` in ``__init__``; an evaluation forgets ``eval_use_gather_object``."""
        use = trainer.args.eval_use_gather_object
        trainer.gather_function = functools.partial(self.accelerator.gather_for_metrics, use_gather_object=use)

    def counts(self) -> list[int] | None:
        """Real samples of each data rank in the batch in progress; None when there are no repeats in it."""
        if not self.evaluating:
            return None
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader:
            return None
        size = self._batch_size()
        remainder = state.remainder if state.remainder > 0 else self._remainder_of_stream(size)
        if not remainder:
            return None
        return [min(max(remainder - rank * size, 0), size) for rank in range(self.data_ranks)]

    def _batch_size(self) -> int:
        state = self.accelerator.gradient_state
        loader: Any = state.active_dataloader
        if isinstance(loader, DataLoaderDispatcher):  # its last batch is shared out anew
            return -(-state.remainder // self.data_ranks) if state.end_of_dataloader else loader.batch_size
        if isinstance(loader.dataset, IterableDatasetShard):
            return loader.dataset.batch_size
        return loader.total_batch_size // self.data_ranks

    def _remainder_of_stream(self, size: int) -> int:
        """Samples in the last batch of a stream that was read in this process, 0 if it is full or they are unknown."""
        shard = self.accelerator.gradient_state.active_dataloader.dataset  # type: ignore[union-attr]
        total = getattr(getattr(shard, "dataset", None), "total", None)
        return (total or 0) % (size * self.data_ranks)

    def mine(self) -> int | None:
        """c of this rank where it is neither none nor all of the batch, else None: then nothing has to be cut."""
        counts = self.counts()
        count = None if counts is None else counts[self.data_rank]
        return count if count is not None and 0 < count < self._batch_size() else None

    def _gather(self, data: Any) -> Any:
        counts = self.counts()
        if counts is not None:
            return recursively_apply(self._real_rows, data, counts)
        return self._gather_once(data) if self.evaluating and self.cp_size > 1 else self.gather(data)

    def _gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As accelerate's: tensors of one shape on all ranks, nested or not, or any objects."""
        if self.cp_size == 1 and self.counts() is None:
            return self.gather_for_metrics(input_data, use_gather_object)
        if use_gather_object or not only_tensors(input_data):
            mine = self.accelerator.process_index % self.cp_size == 0
            return self.gather_for_metrics(input_data if mine else [], use_gather_object=True)
        if self.counts() is not None:
            return self._gather(input_data)
        # Copies are dropped before accelerate cuts the repeats of an uneven last batch, which it finds at the end.
        self.accelerator.gather = self._gather_once  # type: ignore[method-assign]
        try:
            return self.gather_for_metrics(input_data)
        finally:
            self.accelerator.gather = self._gather  # type: ignore[method-assign]

    def _gather_once(self, data: Any) -> Any:
        return recursively_apply(self._drop_copies, self.gather(data))

    def _drop_copies(self, rows: Tensor) -> Tensor:
        """``[world * n, ...]`` -> ``[W * n, ...]``: of every cp_size blocks the first."""
        return rows.unflatten(0, (self.accelerator.num_processes, -1))[:: self.cp_size].flatten(0, 1)

    def _real_rows(self, tensor: Tensor, counts: list[int]) -> Tensor:
        """Rows of real samples of all data ranks, rank by rank; scalars of ranks that have any."""
        size = self._batch_size()
        if tensor.ndim == 0:
            scalars = self.gather(tensor).reshape(-1)[:: self.cp_size]
            times = torch.tensor(counts, device=scalars.device)
            return scalars.repeat_interleave(times if self.scalars_are_means else times.clamp(max=1))
        if self.is_cut:
            tensor = self._fill(tensor, size)
        blocks = self.gather(tensor).unflatten(0, (self.accelerator.num_processes, -1))[:: self.cp_size]
        if blocks.shape[1] % size:
            return blocks.flatten(0, 1)
        samples = blocks.unflatten(1, (-1, size))  # [W, m, B, ...]
        return torch.cat([samples[rank, :, :count].flatten(0, 1) for rank, count in enumerate(counts)])

    def step(self, inputs: dict[str, Any], compute: Callable[[dict[str, Any]], Any]) -> Any:
        """``compute(inputs)``, a loss and nested tensors ``[m*B, ...]`` or None, on the real samples of a batch only.

        Where a batch mixes real samples and repeats, the mean over the real ones is then the loss; what else came out
        has the shape that the whole batch gives.
        """
        count, images_B = self.mine(), inputs.pop(PER_SAMPLE, None)
        if count is None:
            return compute(inputs)
        try:
            loss, logits, labels = compute(self._cut(inputs, count, images_B))
            return loss, self._filled(logits), self._filled(labels)
        finally:
            self.is_cut = False

    def _cut(self, inputs: dict[str, Any], count: int, images_B: Tensor | None = None) -> dict[str, Any]:
        """The first ``count`` samples of a batch of tensors ``[m*B, ...]``; as it is where rows are not samples.

        Samples of a batch ``[1, T]`` (``padding_free``, packing) follow each other in one row. ``images_B`` counts the
        images of each sample.
        """
        size = self._batch_size()
        every = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        tensors = {name: value for name, value in every.items() if not is_of_images(name)}
        ids = tensors.get("input_ids")
        if ids is not None and ids.ndim == 2 and ids.shape[0] == 1 < size:
            real = self._tokens_in_a_row(ids, count)
            tokens = {name: value[:, :real] for name, value in tensors.items() if value.shape[:2] == ids.shape}
            return {**inputs, **tokens}
        images = images_of_first({name: every[name] for name in every.keys() - tensors.keys()}, images_B, count)
        if images is None or any(not tensor.ndim or tensor.shape[0] % size for tensor in tensors.values()):
            return inputs
        self.is_cut = True
        rows = {name: tensor.unflatten(0, (-1, size))[:, :count].flatten(0, 1) for name, tensor in tensors.items()}
        others = {name: value for name, value in inputs.items() if not is_of_images(name)}
        return {**others, **rows, **images}

    def _tokens_in_a_row(self, ids: Tensor, count: int) -> int:
        """Tokens of this rank's ``count`` real samples, which begin a row ``[1, T]``; T if they are not found there.

        Evaluation reads its data set in order, so the last batch of all ranks holds the last samples.
        """
        state = self.accelerator.gradient_state
        dataset: Any = state.active_dataloader.dataset  # type: ignore[union-attr]
        if isinstance(dataset, IterableDataset):
            return ids.shape[1]
        first = len(dataset) - state.remainder + self.data_rank * self._batch_size()
        real = torch.cat([torch.as_tensor(dataset[first + index]["input_ids"]) for index in range(count)])
        return len(real) if torch.equal(ids[0, : len(real)].cpu(), real) else ids.shape[1]

    def _filled(self, data: Any) -> Any:
        return recursively_apply(self._fill, data, self._batch_size()) if self.is_cut else data

    def _fill(self, tensor: Tensor, size: int) -> Tensor:
        """``[m*c, ...]`` -> ``[m*B, ...]`` with zeros, which are left out again after the gather."""
        count = self.mine()
        assert count is not None
        if tensor.ndim == 0 or tensor.shape[0] % count:
            return tensor
        samples = tensor.unflatten(0, (-1, count))
        filled = samples.new_zeros((samples.shape[0], size, *samples.shape[2:]))
        filled[:, :count] = samples
        return filled.flatten(0, 1)

    def items_of_one_process(self, items: Tensor) -> Tensor:
        """Tokens that make a rank's loss, repeated for each of its c real samples, average to that of one process.

        Losses are ``S W / items`` for a sum S over this rank's tokens. With n samples and N tokens in all, one process
        weighs its batch with ``n S / N``: ``items = N c W / n``.
        """
        if self.evaluating and self.cp_size > 1:
            items = items * self.cp_size  # Trainer divided by it, but our gather has dropped the copies already
        counts = self.counts()
        if counts is None or not counts[self.data_rank]:
            return items
        return items * (counts[self.data_rank] * self.data_ranks / sum(counts))


@contextlib.contextmanager
def undivided_aux_loss(trainer: Any) -> Iterator[None]:
    """While open, a batch is no part of a step: TRL divides the aux loss of one that knows its items by the steps."""
    steps = getattr(trainer, "current_gradient_accumulation_steps", None)
    trainer.current_gradient_accumulation_steps = 1
    try:
        yield
    finally:
        trainer.current_gradient_accumulation_steps = steps


def only_tensors(data: Any) -> bool:
    """Whether nested data holds tensors and nothing else, so that it can be gathered without pickling."""
    if isinstance(data, dict):
        return all(only_tensors(x) for x in data.values())
    if isinstance(data, (list, tuple)):
        return all(only_tensors(x) for x in data)
    return isinstance(data, Tensor)
