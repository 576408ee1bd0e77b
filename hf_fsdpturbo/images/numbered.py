"""A data set whose samples know their row, so that a bad one can be named where its batch is made."""

from __future__ import annotations

from typing import Any

from datasets import Dataset


class Sample(dict):
    """A sample, and its ``row``."""

    row: int | None = None


class NumberedDataset(Dataset):
    """``datasets.Dataset`` of :class:`Sample`: what a data loader fetches."""

    def __getitems__(self, keys: list[int]) -> list[Any]:
        samples = [Sample(sample) for sample in super().__getitems__(keys)]
        for sample, row in zip(samples, keys, strict=True):
            sample.row = int(row)
        return samples


def numbered(data: Dataset) -> Dataset:
    """The same rows as :class:`Sample`; a subclass of the user's stays as it is."""
    if type(data) is not Dataset:
        return data
    made = NumberedDataset.__new__(NumberedDataset)
    made.__dict__.update(data.__dict__)
    return made
