"""Issue 18: when a rank takes no step for a hang, and what the error says; no process group, a clock that is moved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_fsdpturbo.trainer import hang_watch
from hf_fsdpturbo.trainer.hang_watch import HangWatch, in_words

GROUP = 100


def config(hang_timeout: int | None, ddp_timeout: int) -> SimpleNamespace:
    return SimpleNamespace(output_dir="out", hang_timeout=hang_timeout, ddp_timeout=ddp_timeout)


class Ended(Exception):
    """In place of the end of the process."""


@pytest.fixture
def run(monkeypatch):
    """A watch in training, a function that lets seconds go by and looks, and what callbacks get."""
    clock = [0.0]
    watcher = SimpleNamespace(each_poll=[])
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(hang_watch, "this_rank", lambda: watcher)
    watch = HangWatch(config(10, GROUP))

    def end(store):
        raise Ended

    monkeypatch.setattr(watch, "_end", end)
    store = SimpleNamespace(set=lambda *pair: None, check=lambda keys: False)

    def go_by(seconds: float) -> None:
        for _ in range(int(seconds)):
            clock[0] += 1
            for look in watcher.each_poll:
                look(store)

    given = (None, SimpleNamespace(global_step=1), SimpleNamespace(should_training_stop=False))
    watch.on_train_begin(*given)
    go_by(1000)  # a resumed run skips its data
    watch.on_step_begin(*given)
    return watch, go_by, given


def test_the_first_step_has_the_group_timeout(run):
    watch, go_by, given = run
    go_by(0.9 * GROUP)
    watch.on_step_end(*given)
    go_by(10)
    with pytest.raises(Ended):
        go_by(1)


def test_micro_batches_and_steps_are_signs(run):
    watch, go_by, given = run
    for sign in (watch.on_step_end, watch.on_substep_end, watch.on_substep_end, watch.on_step_end):
        sign(*given)
        go_by(9)


def test_saving_takes_what_it_takes(run):
    watch, go_by, given = run
    watch.on_step_end(*given)
    with watch.paused():
        go_by(1000)
        with watch.paused():
            go_by(1000)
        go_by(1000)
    go_by(10)
    with pytest.raises(Ended):
        go_by(1)


def test_an_evaluation_is_watched_between_its_steps_only(run):
    watch, go_by, given = run
    watch.on_step_end(*given)
    for _ in range(2):
        with watch.paused():
            go_by(1000)  # generation, a data set that is mapped
            for _ in range(3):
                watch.on_prediction_step(*given, eval_dataloader=[0, 1, 2])
                go_by(9)
            go_by(1000)  # metrics
    with watch.paused():
        watch.on_prediction_step(*given, eval_dataloader=iter(()))
        go_by(1000)  # how many there are is not known
    with watch.paused():
        watch.on_prediction_step(*given, eval_dataloader=[0, 1])
        with pytest.raises(Ended):
            go_by(11)


@pytest.mark.parametrize("how", ["its last step", "early", "an error"])
def test_what_comes_after_training_is_not_watched(run, how):
    watch, go_by, given = run
    watch.on_step_end(*given)
    given[2].should_training_stop = True
    {"its last step": lambda: watch.on_step_end(*given), "early": lambda: watch.on_epoch_end(*given)}.get(
        how, watch.end
    )()
    with watch.paused():
        watch.on_prediction_step(*given, eval_dataloader=[0])
    go_by(1000)


def test_another_ranks_word_ends_this_one(run):
    watch, go_by, given = run
    with pytest.raises(Ended), watch.paused():
        watch._look(SimpleNamespace(check=lambda keys: keys == ["hang"]))


def test_left_out_it_is_nine_tenths_of_the_group_timeout():
    assert HangWatch(config(None, 1800)).timeout == 1620


def test_one_process_has_no_watch():
    HangWatch(config(None, 1800)).end()


def test_the_error_tells_stopped_ranks_from_waiting_ones():
    waits = {"waits": "all_reduce, called by step (a.py:3)", "stands": "?"}
    works = {"waits": None, "stands": "tokenize (b.py:7)"}
    said = in_words({0: waits, 1: None, 2: works, 3: waits}, "60", 7, "out/hang")
    assert said.startswith("No step for 60 s (hang_timeout), after step 7: rank 1, 2 stopped. rank 1 gives no sign (")
    assert "; rank 2 stands in tokenize (b.py:7); rank 0, 3 waits in all_reduce, called by step (a.py:3). " in said


def test_the_error_where_all_wait():
    said = in_words(
        {0: {"waits": "all_reduce", "stands": ""}, 1: {"waits": "barrier", "stands": ""}}, "60", 0, "out/hang"
    )
    assert "all ranks wait" in said
    assert "rank 0 waits in all_reduce; rank 1 waits in barrier" in said
