"""S3: one live run writes into an output directory; a second one is refused by name, a stale claim is taken over."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hf_fsdpturbo import FSDPTurboTrainerMixin
from hf_fsdpturbo.checkpoint import commit, writer
from hf_fsdpturbo.checkpoint.writer import CLAIM, Writer
from hf_fsdpturbo.trainer import saving
from hf_fsdpturbo.trainer.staged_checkpoint import StagedCheckpoint


class Loop:
    """A trainer that looks who may write while it trains."""

    def train(self, *args, **kwargs):
        return self._saving.run, json.loads((self.folder / CLAIM).read_text())


class Trainer(FSDPTurboTrainerMixin, Loop):
    def __init__(self, folder):
        self.folder, self.model = folder, None
        self.args = SimpleNamespace(
            save_strategy="steps", save_on_each_node=False, push_to_hub=False, output_dir=str(folder)
        )
        self._saving = saving.Saving(self, SimpleNamespace(checkpoint_format=None, verify_checkpoint=True))
        self._frozen_base = SimpleNamespace(check=lambda: None)
        self._hang = SimpleNamespace(end=lambda: None)
        self._finite = SimpleNamespace(log=SimpleNamespace(added=lambda: None))
        self._set_up = SimpleNamespace(peak=SimpleNamespace(say_measured=lambda: None))


@pytest.fixture
def other_run():
    """A live process, and what it would have claimed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    claim = {"host": socket.gethostname(), "pid": process.pid, "since": "noon", "run": "abc"}
    yield process, {**claim, "boot": writer._start_of(process.pid)}
    process.kill()
    process.wait()


def test_s3_a_run_claims_its_folder_and_leaves_it(tmp_path):
    run, claim = Trainer(tmp_path).train()
    assert claim["run"] == run
    assert claim["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_s3_a_second_run_is_refused_by_name_until_the_first_has_died(tmp_path, other_run, capsys):
    process, claim = other_run
    (tmp_path / CLAIM).write_text(json.dumps(claim))
    with pytest.raises(ValueError, match=f"process {process.pid} on {claim['host']}, since noon"):
        Trainer(tmp_path).train()
    assert json.loads((tmp_path / CLAIM).read_text()) == claim, "the claim of the live run is touched"
    process.kill()
    process.wait()
    Trainer(tmp_path).train()
    (line,) = capsys.readouterr().out.splitlines()
    assert "whose process is gone" in line


def test_s3_a_process_number_given_out_again_is_another_process(tmp_path, other_run):
    (tmp_path / CLAIM).write_text(json.dumps({**other_run[1], "boot": "1"}))
    assert "gone" in (Writer(str(tmp_path)).note or "")


@pytest.mark.parametrize(("minutes", "is_taken"), [(4, False), (6, True)])
def test_s3_on_another_host_silence_decides(tmp_path, other_run, minutes, is_taken):
    path = tmp_path / CLAIM
    path.write_text(json.dumps({**other_run[1], "host": "elsewhere"}))
    before = path.stat().st_mtime - 60 * minutes
    os.utime(path, (before, before))
    if not is_taken:
        with pytest.raises(ValueError, match="on elsewhere"):
            Writer(str(tmp_path))
        return
    assert "no sign for 6 minutes" in (Writer(str(tmp_path)).note or "")


def test_s3_a_claim_that_was_cut_short_is_stale_after_a_while(tmp_path):
    path = tmp_path / CLAIM
    path.write_text('{"host"')
    with pytest.raises(ValueError, match="unknown host"):
        Writer(str(tmp_path))
    os.utime(path, (0, 0))
    assert Writer(str(tmp_path)).note


@pytest.mark.parametrize("content", [None, "[]", "[" * 5000, '{"pid": 99999999999999999999, "host": "%s"}'])
def test_s3_a_claim_that_no_run_wrote_is_refused_as_an_unknown_one(tmp_path, content):
    path = tmp_path / CLAIM
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content.replace("%s", socket.gethostname()))
    with pytest.raises(ValueError, match="is written by another run"):
        Writer(str(tmp_path))


def test_s3_the_owner_keeps_its_claim_fresh_and_notices_that_it_lost_it(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "BEAT", 0.01)
    path = tmp_path / CLAIM
    mine = Writer(str(tmp_path))
    os.utime(path, (0, 0))
    for _ in range(500):
        if path.stat().st_mtime > 0:
            break
        mine._ended.wait(0.01)
    assert path.stat().st_mtime > 0
    path.write_text(json.dumps({"run": "another"}))
    assert not mine.is_ours()
    mine.release()
    assert path.exists(), "the claim of another run was removed"


def test_s3_a_run_that_was_taken_over_does_not_commit(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.state = SimpleNamespace(global_step=1)
    trainer._saving.begin()
    commit.open_staging(str(tmp_path), "checkpoint-1", trainer._saving.run)
    (tmp_path / CLAIM).write_text(json.dumps({"run": "another"}))
    with pytest.raises(ValueError, match="taken over"):
        StagedCheckpoint(trainer._saving, str(tmp_path)).commit({})
    assert commit.checkpoints(str(tmp_path)) == []


def test_s3_two_runs_stage_apart(tmp_path):
    folders = []
    for run in ("one", "two"):
        folders.append(os.path.join(commit.staging_dir(str(tmp_path), run), "checkpoint-1"))
        os.makedirs(folders[-1])
        assert commit.final_dir(folders[-1]) == str(tmp_path / "checkpoint-1")
    assert commit.staged_entries(str(tmp_path)) == folders
