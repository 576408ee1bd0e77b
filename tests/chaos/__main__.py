"""``python -m tests.chaos``: runs killed, signalled and started twice at random moments, counted; `make chaos`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.chaos.attempts import Chaos

KINDS = ("killed", "signalled", "twice")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--each", type=int, default=100, help="attempts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no attempt begins after so long")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    faults, started = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos_") as folder:
        chaos = Chaos(Path(folder), options.seed)
        for number in range(options.each):
            for kind in options.kinds:
                if time.monotonic() - started > options.seconds:
                    continue
                try:
                    counts.update(f"{kind}: {word}" for word in getattr(chaos, kind)())
                except Exception:  # noqa: BLE001  (whatever went wrong is this attempt's)
                    faults += 1
                    counts[f"{kind}: FAULT"] += 1
                    print(f"seed {options.seed}, {kind} {number}:\n{traceback.format_exc()}", flush=True)
                for left in Path(folder).glob("run*"):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
    print(f"seed {options.seed}, {counts.total()} attempts:")
    for word, count in sorted(counts.items()):
        print(f"  {count:6d} {word}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
