"""Killed, out of space, unwritable, damaged: the newest finished checkpoint always loads, and every rank raises."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from hf_fsdpturbo.checkpoint import commit, intact
from hf_fsdpturbo.ranks import CheckpointError
from tests.support.reference_run import Run, build_trainer
from tests.support.spawn import RankError, run_ranks
from tests.support.tiny_models import save_tiny, texts

ARGS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 1}


def make_run(model: str, **args) -> Run:
    return Run(model=model, data={"text": texts(16)}, args={**ARGS, **args}, turbo={"ep_size": 2}, gradients=False)


def train(run: Run, output_dir: str, resume: str | bool | None = None, async_save: bool = False) -> dict:
    """Rank function."""
    trainer = build_trainer(run, turbo=True, output_dir=output_dir)
    trainer.async_save = async_save
    trainer.train(resume_from_checkpoint=resume)
    return {"step": trainer.state.global_step, "losses": [x["loss"] for x in trainer.state.log_history if "loss" in x]}


def finished(run_dir: Path) -> list[int]:
    return [step for step, path in commit.checkpoints(str(run_dir)) if commit.is_finished(path)]


# Kills


def train_and_kill(run: Run, output_dir: str, victims: list[int], delay: float, async_save: bool) -> None:
    """Rank function: when a later save begins, a thread kills this very process after a delay."""
    rank = int(os.environ["RANK"])
    trainer = build_trainer(run, turbo=True, output_dir=output_dir)
    trainer.async_save = async_save
    save = trainer._save_checkpoint

    def save_and_die(*args):
        # asynchronously, the save of step 2 has waited for checkpoint-1
        if trainer.state.global_step == (3 if async_save else 2) and rank in victims:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        save(*args)

    trainer._save_checkpoint = save_and_die
    trainer.train()


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_killed_during_a_save(tmp_path, async_save):
    """One rank or both, at moments spread over the time a save takes; what was finished before stays, and loads."""
    run = make_run(save_tiny("qwen3_moe", tmp_path / "model"))
    draw = random.Random(0)
    newest = set()
    for attempt in range(6):
        directory = tmp_path / f"run{attempt}"
        moment = attempt * 0.02 + draw.uniform(0, 0.02)
        victims = [[0], [1], [0, 1]][attempt % 3]
        with pytest.raises(RankError):
            run_ranks(train_and_kill, 2, run, str(directory), victims, moment, async_save, timeout=30)
        steps = finished(directory)
        assert 1 in steps, (moment, victims, sorted(os.listdir(directory)))
        for step in steps:
            intact.check(str(directory / f"checkpoint-{step}"))
        newest.add(steps[-1])
        if attempt in (2, 5):
            results = run_ranks(train, 2, run, str(directory), True, timeout=60)
            assert [r["step"] for r in results] == [4, 4]
            assert finished(directory)[-1] == 4
    print("newest finished checkpoints after the kills:", newest)


def test_killed_at_every_stage(tmp_path):
    """Deterministic moments: before the shards, after them, before each step of the commit."""
    run = make_run(save_tiny("qwen3_moe", tmp_path / "model"))
    for stage, survivors in STAGES.items():
        directory = tmp_path / stage
        with pytest.raises(RankError):
            run_ranks(die_at, 2, run, str(directory), stage, timeout=30)
        assert finished(directory) == survivors, stage
        intact.check(str(directory / f"checkpoint-{survivors[-1]}"))
        resumed = run_ranks(resume_only, 2, run, str(directory), timeout=60)
        assert resumed[0][0] == survivors[-1], stage
        if stage != "rotation":
            assert "never finished and is ignored" in resumed[0][1], (stage, resumed[0][1])


STAGES = {
    "dcp_save.save": [1],
    "write_json": [1],
    "rename": [1],
    "rotation": [1, 2],
}


def die_at(run: Run, output_dir: str, stage: str) -> None:
    """Rank function: rank 0 dies during the save of step 2, at the named stage."""
    from hf_fsdpturbo.checkpoint import dcp_save

    trainer = build_trainer(run, turbo=True, output_dir=output_dir)

    def deadly(owner, name, when=lambda *a: True):
        original = getattr(owner, name)

        def dies(*args, **kwargs):
            if os.environ["RANK"] == "0" and trainer.state.global_step == 2 and when(*args):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, dies)

    if stage == "dcp_save.save":
        deadly(dcp_save, "save")
    elif stage == "write_json":
        deadly(commit, "write_json", lambda path, *rest: path.endswith(commit.COMPLETE))
    elif stage == "rename":
        deadly(commit.os, "rename", lambda source, *rest: commit.STAGING in str(source) and str(source).endswith("-2"))
    else:
        deadly(commit, "rotate")
    trainer.train()


def resume_only(run: Run, output_dir: str) -> tuple[int, str]:
    """Rank function: the step that training resumes at, and what was said."""
    import contextlib
    import io

    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.append(state.global_step)
            control.should_training_stop = True

    seen: list[int] = []
    trainer = build_trainer(run, turbo=True, output_dir=output_dir, max_steps=3)
    trainer.add_callback(Stop())
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        trainer.train(resume_from_checkpoint=True)
    return seen[0], said.getvalue()


def test_moved_aside_checkpoint_comes_back(tmp_path):
    """Killed between the two renames of a replacement."""
    make_checkpoint(tmp_path, "checkpoint-3", "old")
    commit.open_staging(str(tmp_path), "checkpoint-3")
    os.rename(tmp_path / "checkpoint-3", tmp_path / commit.STAGING / "replaced-checkpoint-3")
    assert commit.restore_moved_aside(str(tmp_path)) == ["checkpoint-3"]
    assert commit.last_checkpoint(str(tmp_path))[0] == str(tmp_path / "checkpoint-3")


def make_checkpoint(run_dir: Path, name: str, content: str) -> None:
    commit.open_staging(str(run_dir), name)
    (run_dir / commit.STAGING / name / "weights.pt").write_text(content)
    commit.commit(str(run_dir), name, {"step": 3})


# Disk full, unwritable


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no right to mount a small file system here: {done.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def train_until_error(
    run: Run, output_dir: str, file_bytes: int | None = None, full_at: int | None = None
) -> list[str]:
    """Rank function: type and text of what train() raised."""
    trainer = build_trainer(run, turbo=True, output_dir=output_dir)
    if file_bytes:
        trainer.hub_file_bytes = file_bytes
    if full_at is not None:
        fill_disk(trainer, full_at)
    try:
        trainer.train()
    except CheckpointError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def fill_disk(trainer, step: int) -> None:
    """Rank 1 runs out of space from one step on: every write of a shard or weight file fails, as the kernel says."""
    import errno

    from hf_fsdpturbo.checkpoint import hub, shard_file

    def failing(original):
        def write(*args, **kwargs):
            if os.environ["RANK"] == "1" and trainer.state.global_step >= step:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*args, **kwargs)

        return write

    shard_file._write_chunk = failing(shard_file._write_chunk)
    hub._write_all = failing(hub._write_all)


@pytest.mark.parametrize("save_only_model", [False, True], ids=["shards", "hub"])
def test_disk_full_on_one_rank(tmp_path, save_only_model):
    run = make_run(save_tiny("qwen3_moe", tmp_path / "model"), save_only_model=save_only_model)
    directory = tmp_path / "run"
    results = run_ranks(train_until_error, 2, run, str(directory), 20_000, 3, timeout=60)
    for kind, text in results:
        assert kind == "CheckpointError"
        assert "on rank 1 of 2" in text
        assert "No space left on device" in text
    assert finished(directory) == [1, 2]
    intact.check(str(directory / "checkpoint-2"))
    assert not (directory / commit.STAGING).exists(), "a full disk needs the space back"


def test_disk_really_full(tmp_path, small_disk):
    run = make_run(save_tiny("qwen3_moe", tmp_path / "model"), max_steps=12)
    results = run_ranks(train_until_error, 2, run, str(small_disk), timeout=60)
    for kind, text in results:
        assert kind == "CheckpointError", results
        assert "space" in text or "writing" in text, text
    assert len(finished(small_disk)) >= 1
    intact.check(str(small_disk / f"checkpoint-{finished(small_disk)[-1]}"))


def test_output_cannot_be_written(tmp_path):
    run = make_run(save_tiny("qwen3_moe", tmp_path / "model"))
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / commit.STAGING).write_text("a file where the folder should be")
    for kind, text in run_ranks(train_until_error, 2, run, str(directory), timeout=60):
        assert kind == "CheckpointError"
        assert str(directory) in text


# Damage


def damage_missing(checkpoint: Path) -> str:
    (checkpoint / "dcp" / "__1_0.distcp").unlink()
    return "__1_0.distcp is missing"


def damage_truncated(checkpoint: Path) -> str:
    path = checkpoint / "dcp" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    return r"__0_0.distcp has \d+ bytes where \d+ were written"


def damage_unmarked(checkpoint: Path) -> str:
    (checkpoint / commit.COMPLETE).unlink()
    return "has no COMPLETE.json"


def damage_marker(checkpoint: Path) -> str:
    (checkpoint / commit.COMPLETE).write_text("{")
    return "COMPLETE.json is not valid JSON"


def damage_index(checkpoint: Path) -> str:
    path = checkpoint / "dcp" / ".metadata"
    path.write_bytes(b"x" * path.stat().st_size)
    return ".metadata is not the one that was written"


def damage_shape(checkpoint: Path) -> str:
    """Of another model, with a marker that agrees."""
    path, marker = checkpoint / "topology.json", checkpoint / commit.COMPLETE
    facts, marked = json.loads(path.read_text()), json.loads(marker.read_text())
    path.write_text(json.dumps({**facts, "num_experts": 4}))
    marked["hashes"]["topology.json"] = commit.checksum_of(str(path))
    marker.write_text(json.dumps(marked))
    return "num_experts=4"


def damage_shard(checkpoint: Path) -> str:
    """One bit of what only rank 1 reads."""
    path = checkpoint / "dcp" / "__1_0.distcp"
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    return "failed on rank 1 of 2: .*__1_0.distcp is damaged"


def damage_random_state(checkpoint: Path) -> str:
    """One bit of rank 1's: it alone compares it."""
    path = checkpoint / "rng_state_1.pth"
    whole = bytearray(path.read_bytes())
    whole[-1000] ^= 1
    path.write_bytes(whole)
    return "failed on rank 1 of 2: .*rng_state_1.pth is not what was written"


class Mark:
    """Its pickle makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def damage_code(checkpoint: Path) -> str:
    """An index that makes a folder when it is unpickled, of the size that the marker has; nothing proves it."""
    write_as_earlier_releases(checkpoint)
    path = checkpoint / "dcp" / ".metadata"
    code = pickle.dumps(Mark(str(checkpoint / "mark")))
    path.write_bytes(code + b"x" * (path.stat().st_size - len(code)))
    return "names posix.mkdir, which is no part of an index"


def write_as_earlier_releases(checkpoint: Path) -> None:
    """Without checksums."""
    marker = json.loads((checkpoint / commit.COMPLETE).read_text())
    del marker["hashes"], marker["files"]["dcp/shards.json"]
    (checkpoint / commit.COMPLETE).write_text(json.dumps(marker))
    (checkpoint / "dcp" / "shards.json").unlink()


def try_resume(run: Run, checkpoints: list[str]) -> list[str]:
    """Rank function: the error of each."""
    errors = []
    for checkpoint in checkpoints:
        trainer = build_trainer(run, turbo=True)
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
            errors.append("")
        except CheckpointError as error:
            errors.append(str(error))
    return errors


def test_damage_is_named_on_every_rank(tmp_path):
    import re

    run = make_run(save_tiny("qwen3_moe", tmp_path / "model"), max_steps=1)
    run_ranks(train, 2, run, str(tmp_path / "run"), timeout=60)
    whole, expected, copies = tmp_path / "run" / "checkpoint-1", [], []
    kinds = [damage_missing, damage_truncated, damage_unmarked, damage_marker, damage_index, damage_shape]
    kinds += [damage_shard, damage_random_state, damage_code]
    for damage in kinds:
        copy = tmp_path / damage.__name__
        shutil.copytree(whole, copy)
        expected.append(damage(copy))
        copies.append(str(copy))
    for errors in run_ranks(try_resume, 2, run, copies, timeout=90):
        for pattern, text in zip(expected, errors, strict=True):
            assert re.search(pattern, text), (pattern, text)
    assert not list(tmp_path.glob("*/mark")), "code of a checkpoint ran"


def disagree(path: str) -> str:
    """Rank function: one rank's copy is bad, the other's is not."""
    import torch.distributed as dist

    from hf_fsdpturbo.ranks import together

    dist.init_process_group("gloo")
    begin = time.monotonic()
    try:
        with together("reading"):
            if dist.get_rank() == 1:
                torch.load(path)
    except CheckpointError as error:
        return f"{time.monotonic() - begin:.0f} {error}"
    return "nothing"


def test_one_rank_s_bad_file_is_raised_everywhere(tmp_path):
    (tmp_path / "bad").write_bytes(b"not a checkpoint")
    for text in run_ranks(disagree, 2, str(tmp_path / "bad"), timeout=30):
        assert text.startswith("0 reading failed on rank 1 of 2"), text
