"""Evaluation that counts each sample once: repeats that fill an uneven last batch leave loss and metrics.

All ranks need a batch in every step, so accelerate fills the last one with samples from the start of the data set. It
cuts them off again after ``gather_for_metrics``, but TRL also gathers with ``gather``, and takes means over batches in
which real samples and repeats are mixed already.

B samples a rank, m rows a sample (2 where a batch is chosen and rejected), c real samples of this rank, W data ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor

from hf_fsdpturbo.trainer.batches import only_tensors


class EvaluationRows:
    """While open, ``gather`` and ``gather_for_metrics`` return each real sample's rows once.

    Args:
        accelerator: whose methods are replaced.
        cp_size: ranks that share a batch, innermost.
        scalars_are_means: a rank's scalar is the mean of its samples, and so comes once for each of them.
    """

    def __init__(self, accelerator: Accelerator, cp_size: int, scalars_are_means: bool = False) -> None:
        self.accelerator = accelerator
        self.cp_size = cp_size
        self.scalars_are_means = scalars_are_means
        self.gather = accelerator.gather
        self.gather_for_metrics = accelerator.gather_for_metrics
        self.data_ranks = accelerator.num_processes // cp_size
        self.data_rank = accelerator.process_index // cp_size
        self.is_cut = False

    def __enter__(self) -> EvaluationRows:
        self.accelerator.gather = self._gather  # type: ignore[method-assign]
        self.accelerator.gather_for_metrics = self._gather_for_metrics  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        self.accelerator.gather = self.gather  # type: ignore[method-assign]
        self.accelerator.gather_for_metrics = self.gather_for_metrics  # type: ignore[method-assign]

    def counts(self) -> list[int] | None:
        """Real samples of each data rank in the batch in progress; None when there are no repeats in it."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return None
        size = self._batch_size()
        return [min(max(state.remainder - rank * size, 0), size) for rank in range(self.data_ranks)]

    def _batch_size(self) -> int:
        return self.accelerator.gradient_state.active_dataloader.total_batch_size // self.data_ranks

    def mine(self) -> int | None:
        """c of this rank where it is neither none nor all of the batch, else None: then nothing has to be cut."""
        counts = self.counts()
        count = None if counts is None else counts[self.data_rank]
        return count if count is not None and 0 < count < self._batch_size() else None

    def cut(self, inputs: dict[str, Any], count: int) -> dict[str, Any]:
        """The first ``count`` samples of a batch of tensors ``[m*B, ...]``; as it is where rows are not samples."""
        size = self._batch_size()
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        if any(not tensor.ndim or tensor.shape[0] % size for tensor in tensors.values()):
            return inputs
        self.is_cut = True
        rows = {name: tensor.unflatten(0, (-1, size))[:, :count].flatten(0, 1) for name, tensor in tensors.items()}
        return {**inputs, **rows}

    def _gather(self, data: Any) -> Any:
        counts = self.counts()
        return self.gather(data) if counts is None else recursively_apply(self._real_rows, data, counts)

    def _gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        if self.counts() is None or use_gather_object or not only_tensors(data):
            return self.gather_for_metrics(data, use_gather_object)
        return self._gather(data)

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

    def filled(self, data: Any) -> Any:
        """What a cut batch gave (``[m*c, ...]`` tensors, nested, or None), in the shape that the whole one gives."""
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


class EvaluateOnce:
    """Overrides of the evaluation loop; before the trainer in the bases.

    Attributes:
        scalars_are_means: whether all scalars the trainer gathers while it evaluates are means over samples.
    """

    scalars_are_means = False

    accelerator: Any
    args: Any
    parallel_state: Any
    _rows: EvaluationRows | None = None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.parallel_state is None:
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        cp_size = self.parallel_state.topology.cp_size
        with EvaluationRows(self.accelerator, cp_size, self.scalars_are_means) as rows:
            self._rows, self.gather_function = rows, self._with_objects(self.accelerator.gather_for_metrics)
            try:
                return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
            finally:
                self._rows, self.gather_function = None, self._with_objects(rows.gather_for_metrics)

    def _with_objects(self, gather: Any) -> Any:
        """As Trainer binds it in ``__init__``; after an evaluation it forgets ``eval_use_gather_object``."""
        return functools.partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Tokens that make a rank's loss, repeated for each of its c real samples, average to that of one process.

        Losses are ``S W / items`` for a sum S over this rank's tokens. With n samples and N tokens in all, one process
        weighs its batch with ``n S / N``: ``items = N c W / n``.
        """
        items = super()._get_num_items_in_batch(*args, **kwargs)  # type: ignore[misc]
        rows = self._rows
        counts = None if rows is None else rows.counts()
        if rows is None or counts is None or not isinstance(items, Tensor):
            return items
        count = counts[rows.data_rank]
        if not count or not self.args.average_tokens_across_devices:
            return items
        # Trainer divided by cp_size, but our gather has dropped the copies already.
        return items * (rows.cp_size * count * rows.data_ranks / sum(counts))

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Where a batch mixes real samples and repeats, only real ones are computed: their mean is the loss."""
        rows = self._rows
        count = None if rows is None else rows.mine()
        if rows is None or count is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        try:
            cut = rows.cut(inputs, count)
            step: Any = super()
            loss, logits, labels = step.prediction_step(model, cut, prediction_loss_only, ignore_keys)
            return loss, rows.filled(logits), rows.filled(labels)
        finally:
            rows.is_cut = False
