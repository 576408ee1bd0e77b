"""Ten of each of the attempts of `make chaos`; runs killed at random moments are in test_checkpoint_faults.py."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.chaos.attempts import Chaos

SEED = 0


@pytest.fixture(scope="module")
def chaos(tmp_path_factory) -> Chaos:
    return Chaos(tmp_path_factory.mktemp("chaos"), SEED)


def test_started_twice(chaos):
    counts = Counter(chaos.twice(10))
    print(f"seed {SEED}: {counts}")
    assert sum("refused" in word for word in counts.elements()) >= 3, counts


def test_signalled(chaos):
    counts = Counter(chaos.signalled(10, resumed=3))
    print(f"seed {SEED}: {counts}")
    assert counts["saved and stopped"] >= 3, counts


def test_the_judge_sees_a_checkpoint_of_no_run_and_one_that_is_gone(chaos):
    place = chaos.folder / "first"
    chaos._judge(place)
    right = chaos.right["first"].pop(2)
    chaos.right["first"][2] = chaos.right["second"][3]
    with pytest.raises(AssertionError, match="checkpoint-2 is no run's"):
        chaos._judge(place)
    chaos.right["first"][2] = right
    (place / "checkpoint-2").rename(chaos.folder / "elsewhere")
    with pytest.raises(AssertionError, match=r"checkpoints \[2\] were saved and are gone"):
        chaos._judge(place)
