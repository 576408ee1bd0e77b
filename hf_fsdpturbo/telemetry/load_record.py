"""``LoadRecord``: what the experts of each layer were given in each logging window, and ``expert_load.npz``.

W windows, M MoE layers, E experts (of the layer that has most: others are padded with zeros). The file's arrays:

    steps [W] int64              the optimizer step at which a window ended
    counts [W, M, E] int64       (token, choice) pairs sent to each expert, summed over ranks
    loss [W] float64             as logged
    tokens_per_second [W] float64
    layers [M] text              names of the experts modules
    experts [M] int64            how many each has
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from dataclasses import dataclass, field
from typing import IO

import numpy as np

FILE = "expert_load.npz"
MOST_WINDOWS = 512
"""Then neighbours are joined, two and two: a long run keeps its whole length and takes a bounded amount of memory."""
MOST_BYTES = 2**30
"""Of a file that is read, and of its arrays."""
_DAMAGED = (KeyError, ValueError, OverflowError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


@dataclass
class LoadRecord:
    """Windows of a run in order; ``layers`` gives the number of experts by name."""

    layers: dict[str, int]
    steps: list[int] = field(default_factory=list)
    counts: list[np.ndarray] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def add(self, step: int, counts_ME: np.ndarray, loss: float, rate: float) -> None:
        """A window that ended at ``step``, at ``rate`` tokens a second."""
        self.steps.append(step)
        self.counts.append(counts_ME)
        self.losses.append(loss)
        self.rates.append(rate)
        if len(self.steps) > MOST_WINDOWS:
            self._join_neighbours()

    def _join_neighbours(self) -> None:
        pairs = [slice(i, i + 2) for i in range(0, len(self.steps), 2)]
        self.counts = [np.sum(self.counts[pair], axis=0) for pair in pairs]
        self.losses = [float(np.mean(self.losses[pair])) for pair in pairs]
        self.rates = [float(np.mean(self.rates[pair])) for pair in pairs]
        self.steps = [self.steps[pair][-1] for pair in pairs]

    def forget_after(self, step: int) -> None:
        """Leave out windows that end after ``step``: a resumed run goes through them again."""
        kept = sum(end <= step for end in self.steps)
        for values in (self.steps, self.counts, self.losses, self.rates):
            del values[kept:]

    def write(self, folder: str) -> None:
        """Write ``expert_load.npz``, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        path = os.path.join(folder, FILE)
        staging = f"{path}.{os.getpid()}"
        with open(staging, "wb") as file:
            np.savez_compressed(
                file,
                steps=np.array(self.steps, dtype=np.int64),
                counts=np.array(self.counts, dtype=np.int64).reshape(-1, len(self.layers), self.most_experts),
                loss=np.array(self.losses, dtype=np.float64),
                tokens_per_second=np.array(self.rates, dtype=np.float64),
                layers=np.array(list(self.layers)),
                experts=np.array(list(self.layers.values()), dtype=np.int64),
            )
        os.replace(staging, path)

    @property
    def most_experts(self) -> int:
        """E."""
        return max(self.layers.values(), default=0)


def read_load(folder: str) -> LoadRecord:
    """The record in a run's folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is damaged or not one of these.
    """
    path = os.path.join(folder, FILE)
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for a writer
        raise ValueError(f"{path} is not a file. Remove it.")
    try:
        with open(path, "rb") as opened:
            content = io.BytesIO(opened.read(MOST_BYTES))
        _refuse_large(content)
        with np.load(content, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return _checked(arrays)
    except _DAMAGED as error:
        raise ValueError(
            f"{path} is not a record of expert load ({type(error).__name__}: {str(error)[:120]}). Remove it."
        ) from None


def summary(record: LoadRecord) -> str:
    """The last window in words: the layers whose load is least even first."""
    layers = list(zip(record.layers.items(), record.counts[-1], strict=True))
    rows = []
    for (name, experts), count in layers:
        given = count[:experts]
        largest = given.max() * experts / max(given.sum(), 1)
        rows.append((float(largest), int((given == 0).sum()), name))
    rows.sort(key=lambda row: row[0], reverse=True)
    lines = [f"{len(record.steps)} windows to step {record.steps[-1]}; the last one, worst layers first:"]
    lines += [
        f"  {name}: largest load {most:.2f} of the mean, {unused} experts unused" for most, unused, name in rows[:4]
    ]
    return "\n".join(lines)


def _refuse_large(opened: IO[bytes]) -> None:
    with zipfile.ZipFile(opened) as archive:
        if sum(part.file_size for part in archive.infolist()) > MOST_BYTES:
            raise ValueError(f"its arrays have more than {MOST_BYTES:,} bytes")
    opened.seek(0)


def _checked(arrays: dict[str, np.ndarray]) -> LoadRecord:
    names, experts, counts = arrays["layers"], arrays["experts"], arrays["counts"]
    record = LoadRecord({str(name): int(number) for name, number in zip(names, experts, strict=True)})
    windows = len(arrays["steps"])
    if counts.shape != (windows, len(names), record.most_experts) or len(record.layers) != len(names):
        raise ValueError(f"counts {counts.shape} for {windows} windows of {len(names)} layers")
    if counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ValueError("counts must be whole numbers from 0 up")
    record.steps, record.counts = [int(step) for step in arrays["steps"]], list(counts)
    record.losses, record.rates = ([float(value) for value in arrays[name]] for name in ("loss", "tokens_per_second"))
    if {len(record.losses), len(record.rates)} != {windows}:
        raise ValueError(f"{len(record.losses)} losses and {len(record.rates)} rates for {windows} windows")
    return record
