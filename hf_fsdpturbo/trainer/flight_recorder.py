"""What torch's flight recorder knows of this rank's collectives, where it is on (``TORCH_FR_BUFFER_SIZE``)."""

from __future__ import annotations

import json
from typing import Any

import torch

c10d: Any = torch._C._distributed_c10d

MOST = 20


def recorded() -> str:
    """One line a collective; empty where nothing is recorded.

    NCCL has a recorder of its own, which knows what has ended: the first that have not. That of other backends does
    not: the last of each group. Whether there is the first is how torch was built.
    """
    unfinished = _entries(getattr(c10d, "_dump_nccl_trace_json", None), only_active=True)[:MOST]
    last = {str(entry.get("process_group")): entry for entry in _entries(c10d._dump_fr_trace_json, only_active=False)}
    parts = {"collectives that have not ended": unfinished, "the last collective of each group": list(last.values())}
    return "\n".join(
        "\n".join([f"torch's flight recorder, {what}:", *map(_line, entries), ""])
        for what, entries in parts.items()
        if entries
    )


def _entries(dump: Any, only_active: bool) -> list[dict[str, Any]]:
    found = json.loads(dump(includeCollectives=True, onlyActive=only_active)) if dump else {}
    return list(found.get("entries", []))


def _line(entry: dict[str, Any]) -> str:
    group = " ".join(map(str, entry.get("process_group", [])))
    return (
        f"  {entry.get('profiling_name')}, number {entry.get('collective_seq_id')} of group {group}: "
        f"{entry.get('state')}, input {entry.get('input_sizes')}"
    )
