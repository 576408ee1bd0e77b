"""The record of a sweep: JSON by family and check, with the versions it was made with; merged, counted, as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.families.checks import CHECKS, CRASH, NOT_RUN, REFUSED, RIGHT, WRONG
from tests.families.listing import Family

RECORD = Path(__file__).parent / "record.json"
KINDS = (WRONG, CRASH, REFUSED, RIGHT, NOT_RUN)

Record = dict[str, Any]


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    import platform
    from importlib.metadata import version

    found = {name: version(name) for name in ("torch", "transformers", "trl", "accelerate")}
    return {"python": platform.python_version(), **found}


def read(path: Path = RECORD) -> Record:
    """The stored record, or an empty one."""
    if not path.exists():
        return {"versions": versions(), "families": {}}
    return json.loads(path.read_text(encoding="utf-8"))


def write(record: Record, path: Path = RECORD) -> None:
    """Sorted, one fact a line, so that a difference is readable."""
    ordered = {"versions": record["versions"], "families": dict(sorted(record["families"].items()))}
    path.write_text(json.dumps(ordered, indent=1, sort_keys=False, ensure_ascii=False) + "\n", encoding="utf-8")


def enter_family(record: Record, family: Family, reason: str | None = None) -> dict[str, Any]:
    """The family's entry, made if it is new. ``reason``: why it is not swept by itself."""
    entry = record["families"].setdefault(family.name, {"checks": {}})
    entry.update({"architecture": family.architecture, "plan": family.plan})
    if reason is not None:
        entry["not_swept"] = reason
    return entry


def enter_note(record: Record, note: dict[str, Any]) -> None:
    """What one job found."""
    entry = record["families"][note["family"]]
    if "facts" in note:
        entry.pop("not_built", None)
        entry.update(note["facts"])
    elif "failed" in note:
        entry["not_built"] = note["failed"]
    else:
        entry["checks"][note["check"]] = note["verdict"]


def merge(record: Record, parts: list[Record]) -> None:
    """Enter what parts of a sweep found; a check that a part did not ask keeps the verdict it had.

    Raises:
        ValueError: parts made with different versions, or with others than the record and not for all its families.
    """
    for part in parts:
        if part["versions"] != parts[0]["versions"]:
            raise ValueError(f"The parts were made with {parts[0]['versions']} and {part['versions']}: sweep again.")
    found = {name: entry for part in parts for name, entry in part["families"].items()}
    left = sorted(record["families"].keys() - found.keys())
    if left and record["versions"] != parts[0]["versions"]:
        raise ValueError(
            f"The record was made with {record['versions']}, the parts with {parts[0]['versions']}, and they lack "
            f"{left[:5]}: sweep all families."
        )
    record["versions"] = parts[0]["versions"]
    for name, entry in found.items():
        before = record["families"].get(name, {"checks": {}})["checks"]
        asked = {} if entry.get("not_swept") or entry.get("not_built") else before | entry["checks"]
        checks = {check: asked[check] for check in CHECKS if check in asked}
        record["families"][name] = {"checks": checks, **{k: v for k, v in entry.items() if k != "checks"}}
    record["families"] = dict(sorted(record["families"].items()))


def fill_gaps(record: Record, names: list[str], checks: list[str]) -> None:
    """Say ``not run`` where a check was asked for and has no verdict."""
    for name in names:
        entry = record["families"][name]
        reason = entry.get("not_built") or entry.get("not_swept")
        for check in checks:
            if reason is not None:
                entry["checks"].pop(check, None)
            else:
                entry["checks"].setdefault(check, {"kind": NOT_RUN, "detail": "the sweep was cut short"})
        entry["checks"] = {check: entry["checks"][check] for check in CHECKS if check in entry["checks"]}


def totals(record: Record, checks: list[str] | None = None) -> dict[str, int]:
    """Verdicts by kind."""
    count = dict.fromkeys(KINDS, 0)
    for entry in record["families"].values():
        for name, verdict in entry["checks"].items():
            if checks is None or name in checks:
                count[verdict["kind"]] += 1
    return count


def table(record: Record, names: list[str], checks: list[str]) -> str:
    """One line a family, a word a check; then what is not right, with its detail."""
    width = max(map(len, names), default=6) + 2
    lines = [" " * width + " ".join(f"{check:9}" for check in checks)]
    faults = []
    for name in names:
        entry = record["families"][name]
        reason = entry.get("not_built") or entry.get("not_swept")
        if reason is not None:
            lines.append(f"{name:{width}}{reason}")
            continue
        verdicts = {check: entry["checks"].get(check, {"kind": "", "detail": ""}) for check in checks}
        lines.append(f"{name:{width}}" + " ".join(f"{v['kind']:9}" for v in verdicts.values()))
        bad = {check: v for check, v in verdicts.items() if v["kind"] not in ("", RIGHT)}
        faults += [f"{name} {check}: {v['kind']}: {v['detail']}" for check, v in bad.items()]
    count = totals({"families": {name: record["families"][name] for name in names}}, checks)
    return "\n".join([*lines, "", *faults, "", ", ".join(f"{kind} {number}" for kind, number in count.items())])


__all__ = ["RECORD", "Record", "enter_family", "enter_note", "fill_gaps", "merge", "read", "table", "totals", "write"]
