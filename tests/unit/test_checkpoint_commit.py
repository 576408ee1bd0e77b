"""Markers, renames, discovery and rotation on plain directories; optimizer and scheduler facts in one process."""

from __future__ import annotations

import os
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from hf_fsdpturbo.checkpoint import commit, dcp, dcp_save, intact, scheduler
from hf_fsdpturbo.checkpoint.dcp_read import SavedDirectory
from hf_fsdpturbo.ranks import CheckpointError, together


def make(run_dir, step: int, content: str = "x") -> str:
    name = f"checkpoint-{step}"
    commit.open_staging(str(run_dir), name)
    (run_dir / commit.STAGING / name / "weights.pt").write_text(content)
    return commit.commit(str(run_dir), name, {"step": step})


def test_last_checkpoint_skips_the_unfinished_and_says_so(tmp_path):
    make(tmp_path, 2)
    make(tmp_path, 10)
    (tmp_path / "checkpoint-11").mkdir()
    commit.open_staging(str(tmp_path), "checkpoint-12")
    path, notes = commit.last_checkpoint(str(tmp_path))
    assert path == str(tmp_path / "checkpoint-10")
    assert len(notes) == 2
    assert "checkpoint-12 was never finished" in notes[0]
    assert "checkpoint-11 has no COMPLETE.json" in notes[1]


def test_nothing_there(tmp_path):
    assert commit.last_checkpoint(str(tmp_path / "nowhere")) == (None, [])


def test_replacing_a_checkpoint(tmp_path):
    make(tmp_path, 3, "old")
    path = make(tmp_path, 3, "new")
    assert open(os.path.join(path, "weights.pt")).read() == "new"
    assert os.listdir(tmp_path) == ["checkpoint-3"]
    intact.check(path)


def test_transformers_agrees_on_what_is_there(tmp_path):
    from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints

    make(tmp_path, 9)
    make(tmp_path, 10)
    commit.open_staging(str(tmp_path), "checkpoint-11")
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert [os.path.basename(path) for path in sort_checkpoints(str(tmp_path))] == ["checkpoint-9", "checkpoint-10"]


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, [1, 2, 9, 10]),
        (2, None, [9, 10]),
        (2, 1, [1, 10]),
        (1, 2, [2, 10]),
        (1, 10, [10]),
        (3, 1, [1, 9, 10]),
    ],
)
def test_rotation(tmp_path, limit, best, left):
    for step in (1, 2, 9, 10):
        make(tmp_path, step)
    os.utime(tmp_path / "checkpoint-1")  # touched last: age is the step, not the clock
    commit.rotate(str(tmp_path), limit, None if best is None else str(tmp_path / f"checkpoint-{best}"))
    assert [step for step, _ in commit.checkpoints(str(tmp_path))] == left
    assert not (tmp_path / commit.DELETING).exists()


def test_rotation_keeps_the_one_just_made(tmp_path):
    """Resumed from an earlier step, or started again in the same folder: the highest step is not the newest."""
    for step in (200, 300, 400, 250):
        make(tmp_path, step)
    commit.rotate(str(tmp_path), 2, None, str(tmp_path / "checkpoint-250"))
    assert [step for step, _ in commit.checkpoints(str(tmp_path))] == [250, 400]


def test_rotation_never_counts_the_unfinished(tmp_path):
    make(tmp_path, 1)
    (tmp_path / "checkpoint-2").mkdir()
    commit.rotate(str(tmp_path), 1, None)
    assert [step for step, _ in commit.checkpoints(str(tmp_path))] == [1, 2]


def test_a_half_deleted_checkpoint_is_not_taken_for_one(tmp_path, monkeypatch):
    """Killed while it is removed: it has lost its name before its first file."""
    make(tmp_path, 1)
    make(tmp_path, 2)
    monkeypatch.setattr(commit.shutil, "rmtree", lambda *args, **kwargs: None)
    commit.remove(str(tmp_path / "checkpoint-2"))
    assert commit.last_checkpoint(str(tmp_path))[0] == str(tmp_path / "checkpoint-1")


def test_together_in_one_process():
    with pytest.raises(CheckpointError, match="writing failed: OSError: disk"), together("writing"):
        raise OSError("disk")
    with pytest.raises(CheckpointError, match="No space left"), together("writing"):
        raise Exception("No space left on device (os error 28)")  # what tokenizers raises
    with pytest.raises(KeyboardInterrupt), together("writing"):
        raise KeyboardInterrupt


def small(groups: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    split = [[p] for p in model.parameters()] if groups > 1 else [list(model.parameters())]
    optimizer = torch.optim.AdamW([{"params": params} for params in split], lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (4, 4)])
def test_optimizer_follows_parameters_into_other_groups(tmp_path, before, after):
    model, optimizer = small(before)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    dcp_save.save(dcp.gather_state(model, optimizer), str(tmp_path / "dcp"))
    dcp.write_optimizer_json(model, optimizer, str(tmp_path))

    other_model, other = small(after)
    other.state.clear()
    with torch.no_grad():
        other_model[0].weight.zero_()
    other_schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1 / (1 + step))
    dcp.load_model(SavedDirectory(str(tmp_path / "dcp")), other_model)
    dcp.load_optimizer(SavedDirectory(str(tmp_path / "dcp")), str(tmp_path / "optimizer.json"), other_model, other)
    groups = dcp.optimizer_facts(model, optimizer)["groups"]
    state = schedule.state_dict()
    followed = scheduler.follow_groups(state, len(groups), scheduler.group_sources(groups, other_model, other))
    other_schedule.load_state_dict(followed)
    assert len(followed["base_lrs"]) == len(other.param_groups)
    for (name, one), (_, two) in zip(model.named_parameters(), other_model.named_parameters(), strict=True):
        assert torch.equal(one, two), name
        assert optimizer.state[one].keys() == other.state[two].keys()
        assert all(torch.equal(v, other.state[two][k]) for k, v in optimizer.state[one].items()), name


def test_a_parameter_without_state_has_none_after(tmp_path):
    model, optimizer = small(1)
    del optimizer.state[model[1].bias]
    dcp_save.save(dcp.gather_state(model, optimizer), str(tmp_path / "dcp"))
    dcp.write_optimizer_json(model, optimizer, str(tmp_path))
    other_model, other = small(1)
    dcp.load_optimizer(SavedDirectory(str(tmp_path / "dcp")), str(tmp_path / "optimizer.json"), other_model, other)
    assert other_model[1].bias not in other.state
    assert len(other.state) == 3


def test_another_optimizer_is_refused(tmp_path):
    model, optimizer = small(1)
    dcp_save.save(dcp.gather_state(model, optimizer), str(tmp_path / "dcp"))
    dcp.write_optimizer_json(model, optimizer, str(tmp_path))
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="optim.*AdamW.*SGD"):
        dcp.load_optimizer(SavedDirectory(str(tmp_path / "dcp")), str(tmp_path / "optimizer.json"), model, other)


def test_a_foreign_model_is_named(tmp_path):
    model, optimizer = small(1)
    dcp_save.save(dcp.gather_state(model, optimizer), str(tmp_path / "dcp"))
    with pytest.raises(CheckpointError, match=r"0.weight \(saved \(4, 3\), here \(5, 3\)\)"):
        dcp.load_model(SavedDirectory(str(tmp_path / "dcp")), nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    with pytest.raises(CheckpointError, match="another dtype"):
        dcp.load_model(SavedDirectory(str(tmp_path / "dcp")), small(1)[0].bfloat16())


def test_milestones_of_a_chain_are_not_by_group():
    """One saved group, one milestone: a list of one entry a group, by its length."""
    state = {"_milestones": [2], "_last_lr": [0.1], "_schedulers": [{"base_lrs": [0.1]}, {"base_lrs": [0.2]}]}
    followed = scheduler.follow_groups(state, 1, [0, 0, 0])
    assert followed["_milestones"] == [2]
    assert followed["_last_lr"] == [0.1] * 3
    assert [inner["base_lrs"] for inner in followed["_schedulers"]] == [[0.1] * 3, [0.2] * 3]


def test_a_failing_rank_asks_nobody_about_a_background_save(monkeypatch):
    """The others may never come to a collective: waiting for them would hide the error and keep the process."""
    from types import SimpleNamespace

    from hf_fsdpturbo import FSDPTurboTrainerMixin
    from hf_fsdpturbo.trainer import saving

    class Loop:
        def train(self, *args, **kwargs):
            raise RuntimeError("out of memory")

    class Trainer(FSDPTurboTrainerMixin, Loop):
        def __init__(self):
            self.parallel_state, self.model = object(), None  # sharded
            self.callback_handler = SimpleNamespace(callbacks=[])
            self._hang, self._set_up = SimpleNamespace(end=lambda: None), SimpleNamespace(peak=Mock())
            self._saving = saving.Saving(self, SimpleNamespace(checkpoint_format=None, verify_checkpoint=True))
            self._frozen_base = SimpleNamespace(check=lambda: None)
            self._finite = Mock()

    waited = []
    trainer = Trainer()
    trainer.args = SimpleNamespace(save_strategy="no", save_on_each_node=False, push_to_hub=False)
    trainer.async_save = True
    trainer._saving.background = SimpleNamespace(wait=lambda leaving: waited.append(leaving))
    monkeypatch.setattr(saving, "agree", lambda *args: pytest.fail("a collective on the way out"))
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert waited == [True]


def test_rank_0_that_leaves_does_not_wait_for_one_that_is_gone(tmp_path, monkeypatch):
    """Two of three have written; the third never says so. Nothing is committed."""
    import torch.distributed as dist

    from hf_fsdpturbo.checkpoint import background

    monkeypatch.setattr(background, "LAST_SECONDS", 0.3)
    save = background.BackgroundSave({"a": torch.ones(2)}, str(tmp_path / "dcp"), timedelta(seconds=30))
    save._store, committed = dist.HashStore(), []
    monkeypatch.setattr(background, "world_size", lambda: 3)
    save._store.set(save._key(1), "null")
    save._store.add(save._key("number"), 1)
    save.then(lambda: committed.append(True))
    error = save.wait(leaving=True)
    assert isinstance(error, TimeoutError)
    assert "ranks [2] have not said" in str(error)
    assert committed == []


def test_true_from_a_command_line_means_the_newest(monkeypatch):
    """M4: ``--resume_from_checkpoint true`` arrives as text."""
    from types import SimpleNamespace

    from hf_fsdpturbo import FSDPTurboTrainerMixin
    from hf_fsdpturbo.trainer import resumed_from, saving

    class Loop:
        def train(self, resume_from_checkpoint, *args, **kwargs):
            return resume_from_checkpoint

    class Trainer(FSDPTurboTrainerMixin, Loop):
        def __init__(self):
            self.parallel_state, self.model = object(), None  # sharded
            self.callback_handler = SimpleNamespace(callbacks=[])
            self._hang, self._set_up = SimpleNamespace(end=lambda: None), SimpleNamespace(peak=Mock())
            self._saving = saving.Saving(self, SimpleNamespace(checkpoint_format=None, verify_checkpoint=True))
            self._frozen_base = SimpleNamespace(check=lambda: None)
            self._finite = Mock()
            self.args = SimpleNamespace(
                save_on_each_node=False, push_to_hub=False, output_dir="run", save_strategy="no"
            )

    monkeypatch.setattr(resumed_from, "newest_checkpoint", lambda run_dir, each_node: f"{run_dir}/checkpoint-9")
    asked = {True: "run/checkpoint-9", "true": "run/checkpoint-9", "True": "run/checkpoint-9", None: None, "a": "a"}
    assert {given: Trainer().train(given) for given in asked} == asked


def test_the_best_checkpoint_may_lie_beside_what_was_resumed_from(tmp_path):
    """A run that goes on in another output_dir may have its best checkpoint in the old one; nowhere else."""
    from hf_fsdpturbo.trainer.resuming import _refuse_elsewhere

    old, new, other = (str(tmp_path / name) for name in ("old", "new", "other"))
    _refuse_elsewhere(f"{new}/checkpoint-2", new, None)
    _refuse_elsewhere(f"{old}/checkpoint-1", new, f"{old}/checkpoint-3")
    for best in (f"{other}/checkpoint-1", f"{new}/../other/checkpoint-1"):
        with pytest.raises(ValueError, match="best_model_checkpoint"):
            _refuse_elsewhere(best, new, f"{old}/checkpoint-3")
    with pytest.raises(ValueError, match="best_model_checkpoint"):
        _refuse_elsewhere(f"{old}/checkpoint-1", new, None)
