"""Shards, index and checksums of a checkpoint: what DCP reads of them, what is refused, and what runs no code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from hf_fsdpturbo.checkpoint import commit, dcp_index, dcp_save, intact
from hf_fsdpturbo.checkpoint.dcp_read import SavedDirectory
from hf_fsdpturbo.checkpoint.shard_file import ShardFile
from hf_fsdpturbo.checkpoint.tiling import check_tiles
from hf_fsdpturbo.ranks import CheckpointError
from hf_fsdpturbo.shards import Box

STATE = {
    "model.weight": torch.arange(24, dtype=torch.bfloat16).view(4, 6),
    "optim.weight.step": torch.tensor(3.0),
    "model.view": torch.arange(1000.0)[10:14],
    "model.empty": torch.empty(0, 3),
    "model.kept": torch.tensor([True, False]),
}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    dcp_save.save(STATE, str(tmp_path / "dcp"))
    return tmp_path / "dcp"


def read(directory: Path, verify: bool = True) -> dict[str, torch.Tensor]:
    state = {key: torch.zeros_like(tensor) for key, tensor in STATE.items()}
    SavedDirectory(str(directory), verify).read_into(state)
    return state


def equal(state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, state[key]) for key, tensor in STATE.items())


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_dcp_reads_what_we_write_and_we_read_what_it_writes(tmp_path, shards):
    assert equal(read(shards))
    state = {key: torch.zeros_like(tensor) for key, tensor in STATE.items()}
    torch_dcp.load(state, checkpoint_id=str(shards), no_dist=True)
    assert equal(state)
    torch_dcp.save({**STATE, "an object": {"a": 1}}, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    assert equal(read(tmp_path / "theirs"))
    assert not SavedDirectory(str(tmp_path / "theirs")).proven
    assert os.path.getsize(shards / "__0_0.distcp") < 12_000, "a view is written with its whole storage"


def test_two_saves_of_one_state_are_equal_but_for_their_id(tmp_path, shards, monkeypatch):
    """The second index is the first one with another id: no trailer is read again."""
    with monkeypatch.context() as patches:
        patches.setattr(dcp_save.ShardFile, "trailer", None)
        dcp_save.save(STATE, str(tmp_path / "again"))
        with pytest.raises(CheckpointError, match="NoneType"):  # other tensors: the trailers are asked for
            dcp_save.save({"model.weight": STATE["model.weight"]}, str(tmp_path / "other"))
    ids = [json.loads((folder / "shards.json").read_text())["save_id"] for folder in (shards, tmp_path / "again")]
    first, second = ((folder / ".metadata").read_bytes() for folder in (shards, tmp_path / "again"))
    assert ids[0] != ids[1]
    assert first.replace(ids[0].encode(), ids[1].encode()) == second
    assert equal(read(tmp_path / "again"))


def test_every_flipped_bit_of_a_shard_is_seen(tmp_path, monkeypatch):
    """Of chunks that are read and of the trailer, unless nobody asks. (Of an empty tensor nothing is read.)"""
    monkeypatch.delitem(STATE, "model.empty")
    shards, name, found = tmp_path / "dcp", "__0_0.distcp", 0
    dcp_save.save(STATE, str(shards))
    whole = (shards / name).read_bytes()
    for place in range(0, len(whole), 97):
        (shards / name).write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=name):
            read(shards)
        found += 1
    assert found > 50
    (shards / name).write_bytes(whole)
    assert equal(read(shards))
    with ShardFile(str(shards / name)) as file:
        facts = json.loads((shards / "shards.json").read_text())
        chunk = next(c for c in file.trailer(facts["save_id"], None) if c.part.key == "model.weight")
    place = whole.index(STATE["model.weight"].view(torch.uint8).numpy().tobytes(), chunk.start)
    (shards / name).write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    assert not equal(read(shards, verify=False)), "verify_checkpoint: false compares nothing"


def test_foreign_files_are_refused(tmp_path, shards):
    """Another save's shard, index or list, of equal size, each alone."""
    other = tmp_path / "other"
    dcp_save.save({key: tensor.clone() for key, tensor in STATE.items()}, str(other))
    for name, said in {
        "__0_0.distcp": "is of another save",
        ".metadata": "is not the one that was written",
        "shards.json": "is not the one that was written",
    }.items():
        mixed = tmp_path / f"mixed {name}"
        shutil.copytree(shards, mixed)
        if name != "__0_0.distcp":  # which ends with a compressed list of checksums
            assert (mixed / name).stat().st_size == (other / name).stat().st_size
        shutil.copy(other / name, mixed / name)
        with pytest.raises(CheckpointError, match=said):
            read(mixed)


def test_small_files_of_a_checkpoint_have_checksums(tmp_path):
    """A flipped bit of what resume reads is named, unless nobody asks; files that people edit are theirs."""
    commit.open_staging(str(tmp_path), "checkpoint-1")
    staged = tmp_path / commit.STAGING / "checkpoint-1"
    dcp_save.save(STATE, str(staged / "dcp"))
    for name in ("scheduler.pt", "rng_state_0.pth", "trainer_state.json", "config.json"):
        (staged / name).write_text("abc")
    final = Path(commit.commit(str(tmp_path), "checkpoint-1", {"step": 1}))
    assert intact.fault_in(str(final)) is None
    for name in ("scheduler.pt", "rng_state_0.pth", "trainer_state.json", "dcp/shards.json", "config.json"):
        whole = (final / name).read_bytes()
        (final / name).write_bytes(b"X" + whole[1:])
        fault = intact.fault_in(str(final))
        assert (fault is None) == (name == "config.json"), name
        assert fault is None or f"{final / name} is not what was written" in str(fault)
        assert intact.fault_in(str(final), checksums=False) is None
        (final / name).write_bytes(whole)
    marker = json.loads((final / commit.COMPLETE).read_text())
    del marker["hashes"]
    (final / commit.COMPLETE).write_text(json.dumps(marker))
    (final / "scheduler.pt").write_text("abd")
    assert intact.fault_in(str(final)) is None, "one written before there were checksums still resumes"
    marker["files"] = {"../../x": 3}
    (final / commit.COMPLETE).write_text(json.dumps(marker))
    assert "damaged" in str(intact.fault_in(str(final)))


# The index


class Marks:
    """Its pickle makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Wrecks:
    """Its pickle would put something else in the place of a method of DCP's own class."""

    def __reduce__(self):
        from torch.distributed.checkpoint.metadata import Metadata

        return (copy_of, (Metadata,), (None, {"__init__": 0}))


def copy_of(value):
    return value


@pytest.mark.parametrize("where", ["storage_data", "planner_data", "state_dict_metadata"])
def test_a_pickle_runs_no_code(tmp_path, shards, where):
    """S13."""
    index = pickle.loads((shards / ".metadata").read_bytes())
    setattr(index, where, {**getattr(index, where), "model.weight": Marks(str(tmp_path / "mark"))})
    with pytest.raises(ValueError, match=r"\.metadata cannot be read \(it names posix\.mkdir"):
        dcp_index.parse_index(pickle.dumps(index), "x/.metadata")
    assert not (tmp_path / "mark").exists()
    for inner in ("builtins getattr", "os system", "torch load", "torch hub", "torch.serialization load", "a b"):
        module, name = inner.split()
        with pytest.raises(ValueError, match="which is no part of an index"):
            dcp_index.parse_index(f"c{module}\n{name}\n.".encode(), "x")


def test_flipped_bits_of_an_index_that_nothing_proves(shards):
    """Read or refused, never another error, and never more memory than there is (a number may ask for all of it)."""
    import random

    whole, draw = (shards / ".metadata").read_bytes(), random.Random(0)
    said = []
    for _ in range(1000):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        try:
            dcp_index.parse_index(bytes(damaged), "x")
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 500
    assert all(text.startswith("x") for text in said)
    for bomb in (b"\x80\x04Nr\xff\xff\xff\xff.", b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00."):
        with pytest.raises(ValueError, match="x cannot be read"):
            dcp_index.parse_index(bomb, "x")


def test_a_pickle_changes_no_class():
    from torch.distributed.checkpoint.metadata import Metadata

    before = dict(vars(Metadata))
    code = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}Vstate_dict_metadata\nI0\nstb."
    with pytest.raises(ValueError, match="cannot be read"):
        dcp_index.parse_index(code, "x")
    assert dict(vars(Metadata)) == before


def break_index(change) -> str:
    """What is said of an index of one tensor of two chunks after ``change(index)``."""
    from hf_fsdpturbo.checkpoint.shard_file import Chunk, Part

    boxes = [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))]
    files = [
        (f"__{i}_0.distcp", [Chunk(Part("w", "torch.float32", (4, 6), box), 0, 9, "")]) for i, box in enumerate(boxes)
    ]
    index = pickle.loads(dcp_index.index_bytes(files, "id"))
    change(index)
    try:
        dcp_index.parse_index(pickle.dumps(index), "x/.metadata")
    except ValueError as error:
        return str(error)
    return ""


def set_chunk(number: int, **values):
    def change(index) -> None:
        for name, value in values.items():
            setattr(index.state_dict_metadata["w"].chunks[number], name, torch.Size(value))

    return change


def set_place(**values):
    def change(index) -> None:
        for name, value in values.items():
            setattr(next(iter(index.storage_data.values())), name, value)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index: None, ""),
        (lambda index: index.state_dict_metadata["w"].chunks.pop(), "w: its chunks hold 12 elements of 24"),
        (set_chunk(1, sizes=(2, 7)), "w: a chunk at (2, 0) of shape (2, 7) lies outside of (4, 6)"),
        (set_chunk(1, sizes=(2, 2**50)), "lies outside"),
        (set_chunk(0, sizes=(3, 6)), "w: its chunks overlap"),
        (set_chunk(0, sizes=(1, 6)), "w: its chunks hold 18 elements of 24"),
        (set_chunk(0, sizes=(2, 6, 1)), "is no part of (4, 6)"),
        (set_chunk(0, sizes=(-2, 6)), "w has a shape of -2, 6"),
        (set_chunk(1, offsets=(1, 0)), "w lacks the place of its chunk at (1, 0)"),
        (set_place(relative_path="../x"), "w lies in '../x', which is no file beside the index"),
        (set_place(relative_path="/etc/passwd"), "which is no file beside the index"),
        (set_place(relative_path=3), "which is no file beside the index"),
        (set_place(offset=-1), "w lies at -1 + 9"),
        (set_place(length=True), "w lies at 0 + True"),
        (set_place(transform_descriptors=["zstd"]), "w is stored transformed"),
    ],
)
def test_what_an_index_may_say(change, said):
    text = break_index(change)
    assert (text == "") == (said == "")
    assert said in text
    assert not said or text.startswith("x/.metadata")


def test_boxes_that_are_no_grid_are_compared():
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1))]
    pinwheel.append(Box((1, 1), (1, 1)))
    check_tiles((3, 3), pinwheel)
    with pytest.raises(ValueError, match="overlap"):
        check_tiles((3, 3), [*pinwheel[:-1], Box((0, 0), (1, 1))])
    with pytest.raises(ValueError, match="overlap"):
        check_tiles((4,), [Box((0,), (2,)), Box((0,), (2,))])
