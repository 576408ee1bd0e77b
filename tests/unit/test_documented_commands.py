"""Every command of README and pages is run by a test, parsed by one, or marked with the reason why not."""

import re
from collections import Counter

import pytest

from tests.support.documented_commands import ROOT, RUN_BY, Shown, pages, run_by, shown

ALL = [command for page in pages() for command in shown(page)]


def test_there_are_commands():
    assert len(ALL) > 60
    assert {"README.md", "docs/multi_node.md", "docs/zh/README.md"} <= {command.page for command in ALL}


@pytest.mark.parametrize("command", ALL, ids=lambda c: f"{c.page}-{c.command[:40]}")
def test_somebody_runs_it(command: Shown):
    by = run_by(command.command)
    assert by is not None, f"{command.page} shows {command.command!r}: add a row to RUN_BY"
    if not by.startswith("not run: "):
        assert (ROOT / "tests" / by.removeprefix("parsed: ")).is_file(), by


def test_an_unknown_command_is_seen():
    assert run_by("hf-fsdpturbo fly") is None


def test_every_row_is_used():
    used = {next((row for row in RUN_BY if re.match(row[0], c.command)), None) for c in ALL}
    assert [row for row in RUN_BY if row not in used] == []


def test_counts(capsys):
    found = [run_by(c.command) or "" for c in ALL]
    kinds = Counter(by.split(":")[0] if by.startswith(("not run", "parsed")) else "run" for by in found)
    with capsys.disabled():
        print(f"\ncommands in README and pages: {len(ALL)}: {dict(kinds)}")
        for reason, number in Counter(by for by in found if by.startswith("not run")).most_common():
            print(f"  {number} {reason}")


@pytest.mark.parametrize("page", ["README", "ascend", "from_llamafactory"])
def test_chinese_pages_have_the_english_figures(page: str):
    """Commands and table rows of code and numbers are those of the English page."""
    english = ROOT / ("README.md" if page == "README" else f"docs/{page}.md")
    chinese = ROOT / "docs" / "zh" / f"{page}.md"
    theirs = {c.command for c in shown(english)}
    assert [c.command for c in shown(chinese) if c.command not in theirs] == []
    text = english.read_text(encoding="utf-8")
    for line in chinese.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `npu_"):
            yaml, rest = line.split("|")[1].strip(), line.split("|")[4:7]
            (row,) = [english_line for english_line in text.splitlines() if english_line.startswith(f"| {yaml}")]
            assert [c.replace("到", "to").strip() for c in rest] == [c.strip() for c in row.split("|")[4:7]]


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md" and f"({p.name})" not in index]
    assert missing == [], "add a line to docs/README.md"
