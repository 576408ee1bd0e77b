"""``docs/models.md`` says what the record says, and the record knows every family that Transformers has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families.__main__ import main
from tests.families.checks import CHECKS, NOT_RUN
from tests.families.listing import WITHOUT_PLAN, families
from tests.families.nearness import NO_CHOICE
from tests.families.page import page
from tests.families.record import RECORD, read, write
from tests.families.small import SMALL

ROOT = Path(__file__).resolve().parents[2]
AGAIN = "run `make families`"


@pytest.fixture(scope="module")
def record():
    return read()


def test_page_is_written_from_the_record(record):
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == page(record), AGAIN


def test_parts_merge_into_record_and_page(tmp_path, record, capsys):
    """The one command after a sweep in parts."""
    names = list(record["families"])
    parts = [tmp_path / f"part{i}.json" for i in range(3)]
    for i, path in enumerate(parts):
        write({**record, "families": {name: record["families"][name] for name in names[i::3]}}, path)
    merged, markdown = tmp_path / "record.json", tmp_path / "models.md"
    main(["--merge", *map(str, parts), "--record", str(merged), "--markdown", str(markdown)])
    assert merged.read_text(encoding="utf-8") == RECORD.read_text(encoding="utf-8")
    assert markdown.read_text(encoding="utf-8") == page(record)
    assert "qwen3_moe" in capsys.readouterr().out


def test_record_covers_every_family(record):
    assert list(record["families"]) == sorted(families()), AGAIN


def test_every_family_has_every_verdict_or_a_reason(record):
    for name, entry in record["families"].items():
        if entry.get("not_swept") or entry.get("not_built"):
            assert not entry["checks"], name
            continue
        assert list(entry["checks"]) == list(CHECKS), (name, AGAIN)
        for check, verdict in entry["checks"].items():
            assert verdict["detail"], (name, check)


def test_families_are_found():
    """By the plans, not by a list: those that the sweep was made for are among them, with the classes people train."""
    found = families()
    planned = [family for family in found.values() if family.plan]
    assert len(planned) > 68
    assert found.keys() >= WITHOUT_PLAN.keys() | set(SMALL)
    assert found["qwen3_5_moe"].architecture == "Qwen3_5MoeForConditionalGeneration"
    assert found["qwen3_5_moe_text"].architecture == "Qwen3_5MoeForCausalLM"
    assert found["qwen3_vl_moe_text"].part_of == ("qwen3_vl_moe",)


def test_page_has_no_machine_path(record):
    text = page(record)
    assert "/tmp" not in text
    assert "/work" not in text


def test_only_checks_that_cannot_be_asked_are_not_run(record):
    left = [
        (name, check)
        for name, entry in record["families"].items()
        for check, verdict in entry["checks"].items()
        if verdict["kind"] == NOT_RUN
    ]
    assert left == sorted([("openai_privacy_filter", "save_path"), *((name, "near") for name in NO_CHOICE)])
