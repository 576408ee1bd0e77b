"""A slim part of `make fuzz`: each bad input is refused by name on every rank or does no harm."""

from __future__ import annotations

import pytest

from tests.fuzz.judge import BAD, run


@pytest.mark.parametrize(("ranks", "cases"), [(2, 100), (1, 60)])
def test_bad_inputs(tmp_path, ranks: int, cases: int):
    found = run(cases, 1, str(tmp_path), ranks, first=0 if ranks > 1 else 1000)
    print(found["counts"])
    assert not [entry for entry in found["bad"] if entry[1] in BAD], found
