"""Run peers' own tests with their classes and with ours, and compare: ``python -m tests.peers FOLDER [FILE ...]``.

FOLDER is a checkout of TRL or Transformers (its tests, of the installed release if they are to pass); FILES are below
it. What passes with the peer's class passes with ours, or stands in ``expected.py``; a row there that passes is stale.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as tree
from pathlib import Path

from tests.peers import stand_ins
from tests.peers.expected import EXPECTED

HERE = Path(__file__).resolve().parent
FILES = (
    "tests/test_reward_trainer.py",
    "tests/test_sft_trainer.py",
    "tests/test_dpo_trainer.py",
    "tests/trainer/test_trainer.py",
    "tests/trainer/test_trainer_callback.py",
    "tests/trainer/test_trainer_jit_checkpoint.py",
    "tests/trainer/test_trainer_utils.py",
)
"""TRL's, then Transformers'; those that the checkout has are run."""
LIMIT = 1500  # seconds for one file with one set of classes
EACH = 120  # seconds for one test


def outcomes(checkout: Path, file: str, classes: str, work: Path, select: str) -> dict[str, str]:
    """``passed``, ``failed`` or ``skipped`` of each test by id."""
    report = work / f"{Path(file).stem}-{classes}.xml"
    environment = {
        **os.environ,
        "PEERS_CLASSES": classes,
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(HERE.parents[1]), str(checkout), os.environ.get("PYTHONPATH", "")]
        ),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "peers_plugin", "-p", "no:cacheprovider", "-o", "addopts="]
    command += [str(checkout / file), f"--junitxml={report}", f"--timeout={EACH}", *(["-k", select] if select else [])]
    with open(work / f"{Path(file).stem}-{classes}.log", "w", encoding="utf-8") as log:
        subprocess.run(command, cwd=work, env=environment, stdout=log, stderr=log, timeout=LIMIT, check=False)
    found = {}
    for case in tree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        found[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return found


def compare(theirs: dict[str, str], ours: dict[str, str]) -> tuple[list[str], list[str]]:
    """Tests that fail with ours only and are not expected to; expected ones that pass."""
    lost = [name for name, outcome in theirs.items() if outcome == "passed" and ours.get(name) != "passed"]
    unexpected = [name for name in lost if name.partition("[")[0] not in EXPECTED]
    stale = [name for name, outcome in ours.items() if outcome == "passed" and name.partition("[")[0] in EXPECTED]
    return unexpected, stale


def main(arguments: list[str]) -> int:
    """Exit status 1 where a test is lost without a reason, or a row of ``expected.py`` is stale."""
    checkout = Path(arguments[0]).resolve()
    files = arguments[1:] or [file for file in FILES if (checkout / file).exists()]
    select = os.environ.get("PEERS_SELECT", "")
    work = Path(tempfile.mkdtemp(prefix="peers_"))
    stand_ins.make(work)
    status = 0
    for file in files:
        theirs, ours = (outcomes(checkout, file, classes, work, select) for classes in ("theirs", "ours"))
        unexpected, stale = compare(theirs, ours)
        passed = [sum(outcome == "passed" for outcome in found.values()) for found in (theirs, ours)]
        print(f"{file}: {passed[0]} of {len(theirs)} pass with the peer's class, {passed[1]} with ours ({work})")
        for name in unexpected:
            print(f"  fails with ours only: {name}")
        for name in stale:
            print(f"  passes, though expected.py says it must not: {name}")
        status |= bool(unexpected or stale)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
