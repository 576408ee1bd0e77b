"""``python -m tests.fuzz``: many cases on two ranks and in one process, their counts printed; `make fuzz`."""

from __future__ import annotations

import argparse
import sys
import tempfile

from tests.fuzz.judge import BAD, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1])
    options = parser.parse_args()
    failed = False
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
            found = run(options.cases, options.seed, folder, ranks, options.first, show=True)
        print(f"{ranks} rank(s), seed {options.seed}, {found['total']} cases:")
        for word, count in sorted(found["counts"].items()):
            print(f"  {count:6d} {word}")
        for word, count in sorted(found["kinds"].items()):
            print(f"    {count:6d} {word}")
        failed = failed or any(found["counts"].get(word) for word in BAD)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
