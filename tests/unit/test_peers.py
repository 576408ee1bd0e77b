"""Peers' tests: the comparison of two runs, and the list of what is expected to differ."""

from __future__ import annotations

from tests.peers import expected
from tests.peers.__main__ import compare


def test_what_is_lost_needs_a_reason_and_a_reason_needs_a_loss(monkeypatch):
    theirs = {"A::kept": "passed", "A::lost[x]": "passed", "A::known[y]": "passed", "A::broken": "failed"}
    ours = {"A::kept": "passed", "A::lost[x]": "failed", "A::known[y]": "failed", "A::broken": "failed"}
    monkeypatch.setattr(expected, "EXPECTED", {})
    monkeypatch.setattr("tests.peers.__main__.EXPECTED", {"A::known": "a reason"})
    assert compare(theirs, ours) == (["A::lost[x]"], [])
    assert compare(theirs, {**ours, "A::lost[x]": "passed", "A::known[y]": "passed"}) == ([], ["A::known[y]"])


def test_every_row_has_a_reason():
    assert all(len(reason) > 10 for reason in expected.EXPECTED.values())
