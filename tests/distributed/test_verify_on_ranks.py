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
