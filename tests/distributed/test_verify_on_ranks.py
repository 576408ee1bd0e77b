"""``hf-fsdpturbo verify`` itself on two ranks: exact, and red where a fault is put in."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from tests.support.spawn import run_plain


def proven(*words: str) -> dict[str, Any]:
    """In a fresh process: the JSON of one command, and its exit status."""
    from hf_fsdpturbo.commands import verify_door

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = verify_door.main([*words, "--json", "--device", "cpu", "--seconds", "60"])
    return {**json.loads(said.getvalue()), "status": status}


def test_a_run_is_exact_and_says_so_row_by_row():
    found = run_plain(proven, "glm-4.5-air", "--bf16", "false", timeout=100)
    rows = {row["row"]: row for row in found["rows"]}
    assert {row["verdict"] for row in rows.values()} == {"exact"}, rows
    assert rows.keys() == {
        "loaded", "loss", "gradients", "norm", "weights", "saved file", "recompute", "packing", "resume at efsdp2",
    }  # fmt: skip
    assert (found["status"], found["exact"]) == (0, True)
    assert 0 < rows["gradients"]["found"] < rows["gradients"]["allowed"] < 1e-4


def test_an_export_with_two_experts_exchanged_is_red_and_nothing_else():
    found = run_plain(proven, "gpt-oss-20b", "--inject", "export_swapped", timeout=100)
    assert [row["row"] for row in found["rows"] if row["verdict"] != "exact"] == ["saved file"]
    assert (found["status"], found["exact"]) == (1, False)


def test_preferences_are_exact_and_red_where_a_resumed_run_forgets():
    """The run before the fault's is a proof of its own: all of its rows are exact."""
    found = run_plain(proven, "qwen3-30b-a3b", "--command", "dpo", "--inject", "moments_lost", timeout=100)
    rows = {row["row"]: row["verdict"] for row in found["rows"]}
    trained = ("loaded", "loss", "gradients", "norm", "weights", "saved file")
    assert rows == {**dict.fromkeys(trained, "exact"), "resume at efsdp2": "differs"}, found["rows"]


def test_a_reward_model_is_exact_and_red_where_its_recompute_differs():
    found = run_plain(proven, "gpt-oss-20b", "--command", "reward", "--inject", "recompute_differs", timeout=100)
    rows = {row["row"]: row["verdict"] for row in found["rows"]}
    trained = ("loaded", "loss", "gradients", "norm", "weights", "saved file")
    assert rows == {**dict.fromkeys(trained, "exact"), "recompute": "differs"}, found["rows"]
