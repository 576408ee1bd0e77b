"""Families without an expert plan: the built-in adapters, and docs/register.md's code as it stands, are exact."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.families.checks import RIGHT
from tests.families.listing import families
from tests.families.sweep import Job, run_jobs
from tests.support.spawn import run_plain, run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "register.md"
BUILT_IN = ("llama4", "longcat_flash")
REGISTERED = ("jetmoe", "dbrx", "doge")
CHECKS_ON = {2: ("load", "train", "object", "save", "save_path"), 4: ("load4", "train4")}


def page_code() -> dict[str, str]:
    """The page's code by family."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return {re.search(r'register\("(\w+)"', block)[1]: block for block in blocks}


def run_registered(jobs: list[Job], folder: str, notes: str) -> None:
    """Rank function: register what the page registers, then the sweep's jobs."""
    for code in page_code().values():
        exec(compile(code, str(PAGE), "exec"), {})
    run_jobs(jobs, folder, notes)


def _ask(folder: Path, names: tuple[str, ...], world: int) -> dict[tuple[str, str], tuple[str, str]]:
    import json

    jobs = [Job(families()[name], check) for name in names for check in CHECKS_ON[world]]
    notes = folder / f"notes_{world}.jsonl"
    run_ranks(run_registered, world, jobs, str(folder), str(notes), timeout=240)
    read = [json.loads(line) for line in notes.read_text().splitlines()]
    done = [note for note in read if note["state"] == "done"]
    return {(n["family"], n["check"]): (n["verdict"]["kind"], n["verdict"]["detail"]) for n in done}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[tuple[str, str], tuple[str, str]]:
    folder = tmp_path_factory.mktemp("register")
    prepared = [Job(families()[name], "prepare") for name in (*BUILT_IN, *REGISTERED)]
    run_plain(run_jobs, prepared, str(folder), str(folder / "plain.jsonl"), timeout=120)
    names = (*BUILT_IN, *REGISTERED)
    return functools.reduce(lambda found, world: found | _ask(folder, names, world), CHECKS_ON, {})


def test_the_page_has_one_block_for_each():
    assert tuple(page_code()) == REGISTERED


@pytest.mark.parametrize("family", [*BUILT_IN, *REGISTERED])
def test_exact(verdicts, family: str):
    mine = {check: verdict for (name, check), verdict in verdicts.items() if name == family}
    assert set(mine) == {check for checks in CHECKS_ON.values() for check in checks}
    assert not {check: verdict for check, verdict in mine.items() if verdict[0] != RIGHT}
