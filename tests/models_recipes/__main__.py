"""``python -m tests.models_recipes --write`` writes ``recipes/models``; with names, two CPU steps of each."""

from __future__ import annotations

import argparse
import sys
import time

from hf_fsdpturbo.shipped import model_recipes


def main() -> int:
    """Write, or run the named recipes; exit status 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.models_recipes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MODEL/KIND_NxM", help="recipes to run; none: all")
    parser.add_argument("--write", action="store_true", help="write the recipes and print who fits where")
    given = parser.parse_args()
    if given.write:
        from tests.models_recipes.written import write_all

        print(write_all())
        return 0
    from tests.models_recipes.run import two_steps
    from tests.support.spawn import RankError

    failed = 0
    for name in given.names or model_recipes():
        start = time.monotonic()
        try:
            losses = two_steps(name)
            print(f"{name}: losses {losses}, {time.monotonic() - start:.0f} s", flush=True)
        except (RankError, ValueError, AssertionError) as error:
            failed += 1
            print(f"{name}: FAILED {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
