"""``hf-fsdpturbo doctor``: is this machine ready? Versions, known-bad pairs, devices, operators, a two-rank exchange.

It never imports torch itself (a torch-npu without CANN makes ``import torch`` fail): whatever can break is looked at
in child processes with hard timeouts. Exit code 0 when nothing failed, 1 otherwise.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hf_fsdpturbo.doctor.checks import (
    FAIL,
    Finding,
    exchange_finding,
    known_bad_pairs,
    stack_findings,
    torch_findings,
    versions,
)
from hf_fsdpturbo.doctor.probes import finish_probe, run_probe, start_probe
from hf_fsdpturbo.launch_config import variables

TIMEOUT = 120.0  # seconds a probe may take: a cold import of the training stack on a slow disk takes half of it


def exchange(backend: str, timeout: float) -> Finding:
    """Two ranks exchange rows over a backend."""
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        store = str(Path(folder, "store"))
        ranks = [start_probe("exchange", backend, str(rank), store) for rank in range(2)]
        reports = [finish_probe(rank, timeout) for rank in ranks]
    return exchange_finding(backend, next((r for r in reports if "error" in r), reports[0]))


def look_at_torch(timeout: float) -> dict[str, Any]:
    """The torch probe; where it fails, whether torch alone (no device backend loaded by itself) would import."""
    report = run_probe("torch", timeout=timeout)
    if "error" in report:
        with variables(TORCH_DEVICE_BACKEND_AUTOLOAD="0"):
            report["without_autoload"] = "error" not in run_probe("import", timeout=timeout)
    return report


def examine(timeout: float = TIMEOUT) -> list[Finding]:
    """All findings, in the order of the table."""
    report = look_at_torch(timeout)
    found = [*versions(), *known_bad_pairs(report), *torch_findings(report)]
    if "error" in report:
        return found
    found += stack_findings(run_probe("stack", timeout=timeout))
    if report["backends"].get("gloo"):
        found.append(exchange("gloo", timeout))
    native = {"cuda": "nccl", "npu": "hccl"}.get(report["accelerator"])
    if native and len(report["devices"]) >= 2:
        found.append(exchange(native, timeout))
    return found


def table(found: list[Finding]) -> str:
    """The findings as text: one line each, the fix under what needs one."""
    lines = []
    width = max(len(finding.name) for finding in found)
    group = ""
    for finding in found:
        if finding.group != group:
            group = finding.group
            lines.append(group)
        lines.append(f"  {finding.status:<4}  {finding.name:<{width}}  {finding.detail}")
        if finding.fix and finding.status not in ("ok", "note"):
            lines.append(f"        {'':<{width}}  -> {finding.fix}")
    failed = sum(finding.status == FAIL for finding in found)
    warned = sum(finding.status == "warn" for finding in found)
    lines.append(f"{failed} failed, {warned} warnings, {len(found)} checks")
    return "\n".join(lines)


def run(as_json: bool = False, timeout: float = TIMEOUT) -> int:
    """Examine, print, and return the exit code."""
    found = examine(timeout)
    ok = not any(finding.status == FAIL for finding in found)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [vars(finding) for finding in found]}, indent=2))
    else:
        print(table(found))
    return 0 if ok else 1
