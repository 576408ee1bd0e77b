"""``python -m tests.families``: sweep the model families, print a table, keep the record, write ``docs/models.md``.

All at once (``make families``), or in parts, in any order and again where one was cut short, and then together:

    python -m tests.families --part 1/8 --record part1.json
    ...
    python -m tests.families --merge part*.json --markdown docs/models.md

The second puts the parts into ``tests/families/record.json`` and writes the page from it. How far each gradient of a
bf16 run is from float32, beside plain's distance: ``python -m tests.families --checks near --distances``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.families import record as records
from tests.families.checks import CHECKS, CRASH, DISTANCES, WRONG
from tests.families.listing import Family, families, not_swept
from tests.families.small import SMALL
from tests.families.sweep import Job, carry_out, preparations


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.families", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names of families, with commas between")
    parser.add_argument("--checks", help=f"of {', '.join(CHECKS)}; default: all")
    parser.add_argument("--world", type=int, choices=(2, 4), help="only the checks on so many ranks")
    parser.add_argument("--small", action="store_true", help=f"only {', '.join(SMALL)}")
    parser.add_argument("--part", default="1/1", help="i/n: the i-th of n parts of the list, for short runs")
    parser.add_argument("--record", type=Path, default=records.RECORD, help="JSON that the results are merged into")
    parser.add_argument("--markdown", type=Path, help="write the page of the whole record there")
    parser.add_argument("--folder", type=Path, help="keep checkpoints and logs there; default: nowhere")
    parser.add_argument("--distances", action="store_true", help="print every tensor that the check near compared")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="RECORD", help="sweep nothing: merge these parts")
    parser.add_argument("--seconds", type=float, default=3600, help="limit of one spawn")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Family]:
    """Families by the options.

    Raises:
        ValueError: a name that is none.
    """
    known = families()
    names = options.only.split(",") if options.only else list(SMALL) if options.small else list(known)
    if unknown := sorted(set(names) - known.keys()):
        raise ValueError(f"--only {unknown}: no such family. Known are {', '.join(known)}.")
    part, parts = map(int, options.part.split("/"))
    return [known[name] for name in names][part - 1 :: parts]


def chosen_checks(options: argparse.Namespace) -> list[str]:
    """Checks by the options, in the order of :data:`CHECKS`.

    Raises:
        ValueError: a name that is none.
    """
    names = options.checks.split(",") if options.checks else list(CHECKS)
    if unknown := sorted(set(names) - CHECKS.keys()):
        raise ValueError(f"--checks {unknown}: known are {', '.join(CHECKS)}.")
    return [name for name in CHECKS if name in names and options.world in (None, CHECKS[name].world)]


def sweep(wanted: list[Family], checks: list[str], record: records.Record, folder: Path, seconds: float) -> None:
    """Fill the record: one plain process, then the ranks."""

    def report(note: dict) -> None:
        records.enter_note(record, note)
        verdict = note.get("verdict")
        text = note.get("failed", "built") if verdict is None else f"{verdict['kind']}: {verdict['detail']}"
        print(f"{note['family']} {note['check']} ({note.get('seconds', '-')} s): {text}"[:240], flush=True)

    swept = []
    for family in wanted:
        reason = not_swept(family)
        records.enter_family(record, family, reason)
        if reason is None:
            swept.append(family)
    record["versions"] = records.versions()
    carry_out(preparations(swept, checks), 1, folder, limit=seconds, report=report)
    built = [family for family in swept if "not_built" not in record["families"][family.name]]
    for world in sorted({CHECKS[name].world for name in checks}):
        asked = [name for name in checks if CHECKS[name].world == world]
        jobs = [Job(family, name) for family in built for name in asked]
        carry_out(jobs, world, folder, limit=seconds, report=report)
    records.fill_gaps(record, [family.name for family in wanted], checks)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    record, checks = records.read(options.record), chosen_checks(options)
    if options.merge:
        parts = [records.read(path) for path in options.merge]
        records.merge(record, parts)
        records.write(record, options.record)
        names = sorted({name for part in parts for name in part["families"]})
    else:
        wanted = chosen(options)
        sweep_and_keep(wanted, checks, record, options)
        names = [family.name for family in wanted]
    print(records.table(record, names, checks))
    if options.markdown is not None:
        from tests.families.page import page

        options.markdown.write_text(page(record), encoding="utf-8")
    count = records.totals({"families": {name: record["families"][name] for name in names}}, checks)
    return 1 if count[WRONG] or count[CRASH] else 0


def sweep_and_keep(
    wanted: list[Family], checks: list[str], record: records.Record, options: argparse.Namespace
) -> None:
    """Sweep; what was found before an interruption is kept."""
    folder = options.folder or Path(tempfile.mkdtemp(prefix="families_"))
    try:
        sweep(wanted, checks, record, folder, options.seconds)
    finally:
        records.write(record, options.record)
        if options.distances:
            files = (folder / family.name / DISTANCES for family in wanted)
            print(*(file.read_text(encoding="utf-8") for file in files if file.exists()), sep="\n")
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
