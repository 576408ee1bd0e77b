"""The spawner itself: results in rank order, the first failure with its rank, a deadline that kills, no collisions."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.support.spawn import RankError, RankTimeout, init_gloo, run_plain, run_ranks


def add_ranks(start: float) -> tuple[int, float, int, str | None]:
    init_gloo()
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), float(value), os.getpid(), os.environ.get("FSDPTURBO_EP_SIZE")


def fail_on(rank: int) -> None:
    init_gloo()
    if dist.get_rank() == rank:
        print("a last word")
        raise KeyError("lost")
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int) -> int:
    init_gloo()
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))
    return os.getpid()


def die_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os._exit(3)
    time.sleep(600)


def launcher_variables() -> list[str]:
    return [name for name in ("RANK", "WORLD_SIZE", "MASTER_PORT") if name in os.environ]


def test_results_come_in_rank_order_from_fresh_processes():
    found = run_ranks(add_ranks, 4, 1.0, env={"FSDPTURBO_EP_SIZE": "2"})
    assert [row[0] for row in found] == [0, 1, 2, 3]
    assert {row[1] for row in found} == {10.0}
    assert len({row[2] for row in found} | {os.getpid()}) == 5
    assert {row[3] for row in found} == {"2"}
    assert run_ranks(add_ranks, 1, 0.0)[0][3] is None, "one call's environment reached the next"


def test_a_plain_process_has_no_launcher():
    assert run_plain(launcher_variables) == []


def test_two_calls_at_once_do_not_meet():
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(run_ranks, add_ranks, 2, start) for start in (0.0, 100.0)]
        assert [call.result()[0][1] for call in calls] == [1.0, 201.0]


def test_the_failing_rank_is_named():
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1: KeyError: 'lost'") as caught:
        run_ranks(fail_on, 3, 1, timeout=60)
    assert caught.value.rank == 1
    assert 'raise KeyError("lost")' in str(caught.value), "no traceback"
    assert "a last word" in str(caught.value)
    assert time.monotonic() - start < 30, "waited for ranks that cannot finish"


def test_a_dead_rank_is_named():
    with pytest.raises(RankError, match="rank 1: Died: exit code 3"):
        run_ranks(die_on, 2, 1, timeout=60)


def test_the_deadline_kills_and_shows_stacks():
    start = time.monotonic()
    with pytest.raises(RankTimeout) as caught:
        run_ranks(hang_on, 2, 1, timeout=4)
    assert time.monotonic() - start < 20
    assert "time.sleep" in str(caught.value) or "in hang_on" in str(caught.value)
    assert "all_reduce" in str(caught.value)
