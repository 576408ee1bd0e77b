"""Issue 18: what counts as a rank's own time, and who is the slowest; clocks that are moved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_fsdpturbo.telemetry import metrics, own_time
from hf_fsdpturbo.telemetry.metrics import Telemetry
from hf_fsdpturbo.telemetry.own_time import OwnTime, slowest


@pytest.fixture
def clocks(monkeypatch):
    """Host time, processor time."""
    now = SimpleNamespace(host=100.0, processor=7.0)
    monkeypatch.setattr(own_time.time, "perf_counter", lambda: now.host)
    monkeypatch.setattr(own_time.time, "thread_time", lambda: now.processor)
    return now


@pytest.mark.parametrize("on_host", [True, False])
def test_own_time_is_what_others_do_not_share(clocks, on_host):
    own = OwnTime(computes_on_host=on_host)

    def batches():
        for _ in range(2):
            clocks.host += 3  # a slow loader
            yield 0

    def step() -> None:
        assert len(list(own.batches(batches()))) == 2
        clocks.host += 50  # the count of tokens is gathered: waiting
        own.step_begins()
        clocks.host += 100  # most of it in collectives
        clocks.processor += 8
        own.stepped()
        clocks.host += 1  # a callback

    computing = 8 if on_host else 0
    step()  # nobody knows when the first batches were asked for
    assert own.take() == computing
    step()
    assert own.take() == pytest.approx(1 + 6 + computing)
    own.stops()  # a log line follows
    clocks.host += 20
    own.begins()
    clocks.host += 0.5
    step()
    assert own.take() == pytest.approx(0.5 + 6 + computing)


def test_the_slowest_and_how_long_others_wait():
    assert slowest([2.0, 2.0, 5.0, 1.0], 10.0) == (2, 0.3)
    assert slowest([1.0, 1.0], 10.0)[1] == 0.0


def test_a_line_names_a_straggler_once(monkeypatch, capsys):
    monkeypatch.setattr(metrics, "rank", lambda: 0)
    telemetry = Telemetry(SimpleNamespace(), None)
    telemetry.own = OwnTime(computes_on_host=False)
    second = 1_000_000
    for _ in range(2):  # rank 2 waits least in the exchange: its device is slow
        found = telemetry._straggler([second] * 4, [4 * second, 4 * second, second, 4 * second], 10.0)
        assert found == {"straggler_rank": 2.0, "straggler_share": pytest.approx(0.3)}
    assert telemetry._straggler([second] * 4, [second] * 4, 10.0)["straggler_share"] == 0.0
    telemetry.own = OwnTime(computes_on_host=True)  # there a call's time in the exchange is no part of its own
    assert (
        telemetry._straggler([second, second, second, 3 * second], [0, 0, 9 * second, 0], 10.0)["straggler_rank"] == 3
    )
    said = capsys.readouterr().out
    assert said.count("rank 2 is the slowest: of the last 10.00 s others wait up to 30 % for it") == 1
    assert said.count("rank 3 is the slowest") == 1
