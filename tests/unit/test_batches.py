"""Who reads a data set: what a stream costs at many ranks is said once, and only where it costs."""

from __future__ import annotations

import pytest
from torch.utils.data import Dataset, IterableDataset

from hf_fsdpturbo.trainer import batches
from hf_fsdpturbo.trainer.batches import SharedBatches


class Stream(IterableDataset):
    """Counts what is read of it."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __iter__(self):
        for sample in range(self.length):
            self.read += 1
            yield sample


class Files(Stream):
    n_shards = 16


class Rows(Dataset):
    pass


@pytest.mark.parametrize(
    ("dataset", "cp", "ranks", "dispatch", "parts"),
    [
        (Stream(1), 1, 16, None, ("each of 16 data ranks reads 16 batches", "16 or more equal shards")),
        (Stream(1), 1, 16, True, ("rank 0 reads 16 batches", "sends them all")),
        (Stream(1), 1, 16, False, ("each of 16 data ranks reads 16 batches",)),
        (Files(1), 1, 16, None, ("each of 16 data ranks reads 16 batches",)),
        (Files(1), 1, 16, False, None),  # files of its own
        (Files(1), 1, 32, False, ("each of 32 data ranks reads 32",)),  # too few files: accelerate reads all
        (Files(1), 2, 16, False, ("each of 16 data ranks reads 16", "Use a map-style data set.")),
        (Stream(1), 1, 7, None, None),
        (Rows(), 1, 1024, None, None),
    ],
)
def test_cost_of_a_stream(dataset, cp: int, ranks: int, dispatch: bool | None, parts: tuple[str, ...] | None):
    said = SharedBatches(cp, ranks).cost_of_stream(dataset, dispatch)
    if parts is None:
        assert said is None
    else:
        assert all(part in said for part in parts), said


def test_said_once_and_by_rank_0(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    shared, stream = SharedBatches(1, 1024), Stream(1)
    shared.stream(stream, False)
    shared.stream(stream, False)
    assert capsys.readouterr().out.count("each of 1024 data ranks reads 1024 batches") == 1
    monkeypatch.setattr(batches, "rank", lambda: 1)
    SharedBatches(1, 1024).stream(stream, False)
    assert capsys.readouterr().out == ""


def test_what_is_said_is_what_accelerate_reads():
    """Undispatched, one rank of 64 reads 64 batches before it has one."""
    from accelerate.data_loader import IterableDatasetShard

    stream = Stream(10_000)
    iterator = iter(IterableDatasetShard(stream, batch_size=2, num_processes=64, process_index=63))
    assert [next(iterator), next(iterator)] == [126, 127]
    assert stream.read == 64 * 2


@pytest.mark.parametrize(
    ("ranks", "dispatch", "is_whole"),
    [(2, None, True), (2, False, True), (2, True, False), (16, False, False), (1, None, False)],
)
def test_c10b_ranks_share_files_out_only_where_that_is_asked_for(ranks: int, dispatch: bool | None, is_whole: bool):
    """accelerate gives each rank files of its own where it sees them, and files hold different numbers of batches."""
    found = SharedBatches(1, ranks).stream(Files(5), dispatch)
    assert isinstance(found, batches.WholeStream) == is_whole


def test_a_whole_stream_is_its_data_set_and_counts_it():
    import pickle

    from transformers.trainer_utils import has_length

    stream = batches.WholeStream(Files(5))
    assert stream.total is None
    assert list(stream) == [0, 1, 2, 3, 4]
    assert stream.total == 5
    assert stream.read == 5, "attributes of the data set"
    assert not has_length(stream)
    assert list(pickle.loads(pickle.dumps(stream))) == [0, 1, 2, 3, 4]
