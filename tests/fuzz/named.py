"""Cases that are not drawn: what must be refused at every resume."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable

from tests.fuzz.cases import Case, read, write


def named_cases(folder: str, good: dict[str, str]) -> list[Case]:
    """What must be refused, whatever is drawn: files that one rank reads alone, and a step that never was."""
    made = []
    for number, (name, spoil) in enumerate(_SPOILT.items()):
        path = os.path.join(folder, f"named{number}", "checkpoint-2")
        shutil.copytree(good["checkpoint"], path)
        spoil(path)
        made.append(Case(-1 - number, "checkpoint", name, [path], must_refuse=True, checkpoint=path))
    return made


def _spoil_random_state(path: str) -> None:
    file = min(name for name in os.listdir(path) if name.startswith("rng_state"))
    content = bytearray(read(os.path.join(path, file)))
    content[0] ^= 1
    write(os.path.join(path, file), bytes(content))


def _spoil_step(path: str) -> None:
    content = json.loads(read(os.path.join(path, "trainer_state.json")))
    write(os.path.join(path, "trainer_state.json"), json.dumps({**content, "global_step": 10**9}).encode())


def _link_shard(path: str) -> None:
    shard = os.path.join(path, "dcp", min(name for name in os.listdir(os.path.join(path, "dcp")) if "distcp" in name))
    os.rename(shard, os.path.join(path, "..", "elsewhere"))
    os.symlink("../../elsewhere", shard)


_SPOILT: dict[str, Callable[[str], None]] = {
    "first bit of rank 0's random state": _spoil_random_state,
    "stray scaler": lambda path: write(os.path.join(path, "scaler.pt"), b"x"),
    "a step that never was": _spoil_step,
    "a shard that is a link": _link_shard,
}
