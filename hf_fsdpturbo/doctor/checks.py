"""What the doctor concludes from package metadata and from what the probes saw; nothing here imports torch."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from hf_fsdpturbo.compat import FLOORS, OPTIONAL, floor_problem
from hf_fsdpturbo.launch_config import variable

OK, NOTE, WARN, FAIL = "ok", "note", "warn", "FAIL"
PYTHON_FLOOR = (3, 11)
TRITON_WRONG_ON_HOPPER = (Version("3.4"), Version("3.7.1"))  # FLA issue 640: first wrong release, first right one
HUB_KERNELS = Version("0.18.2")  # what Transformers 5.24 wants of ``kernels``


@dataclass(frozen=True)
class Finding:
    """One line of the table. status: ok, note (nothing to do), warn (works, but read it), FAIL (will not work)."""

    group: str
    name: str
    status: str
    detail: str
    fix: str = ""


def installed_version(distribution: str) -> Version | None:
    """From metadata alone: nothing is imported, however odd the installation."""
    try:
        return Version(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> list[Finding]:
    """Installed versions against the floors."""
    where = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    python = Finding("versions", "python", OK, where)
    if sys.version_info < PYTHON_FLOOR:
        python = Finding("versions", "python", FAIL, platform.python_version(), "use Python 3.11 or newer")
    elif platform.system() != "Linux":
        python = Finding("versions", "python", WARN, f"{python.detail}: untested", "use Linux")
    found = [python]
    for package in FLOORS:
        version = installed_version(package)
        problem = floor_problem(package, version)
        status = FAIL if problem else OK
        found.append(Finding("versions", package, status, str(version or "not installed"), problem or ""))
    for module, (distribution, install) in OPTIONAL.items():
        if module == "matplotlib":
            continue
        version = installed_version(distribution)
        detail = str(version) if version else "not installed (optional)"
        found.append(Finding("versions", distribution, OK if version else NOTE, detail, "" if version else install))
    return found


def known_bad_pairs(torch_report: dict[str, Any]) -> list[Finding]:
    """Combinations that are known to be wrong. torch_report: what the torch probe saw; empty if it could not run."""
    torch, npu = installed_version("torch"), installed_version("torch-npu")
    triton, ascend = installed_version("triton"), installed_version("triton-ascend")
    found = []
    if torch is not None and torch.release < (2, 8):
        found.append(Finding(
            "pairs", "torch 2.7 over gloo", WARN, "FSDP2 sums gradients there instead of averaging, and a CP x EP "
            "mesh cannot be built: such runs are refused", "torch>=2.8 for CPU runs",
        ))  # fmt: skip
    if torch is not None and npu is not None and npu.release[:2] != torch.release[:2]:
        found.append(Finding(
            "pairs", "torch-npu / torch", FAIL, f"torch-npu {npu} is made for another torch than {torch}",
            f"pip install torch-npu for torch {torch.major}.{torch.minor}",
        ))  # fmt: skip
    if npu is not None and not any(variable(name) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")):
        found.append(Finding(
            "pairs", "torch-npu without CANN", FAIL, "CANN's environment is not set (ASCEND_HOME_PATH)",
            "source CANN's set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use torch without the NPU",
        ))  # fmt: skip
    if triton is not None and ascend is not None:
        found.append(Finding(
            "pairs", "triton / triton-ascend", WARN, "both are installed and overwrite each other's files",
            "uninstall both, then install triton-ascend",
        ))  # fmt: skip
    hub = installed_version("kernels")
    if hub is not None and hub < HUB_KERNELS:
        detail = f"kernels {hub} is older than {HUB_KERNELS}: hub kernels stay off"
        found.append(Finding("pairs", "kernels / transformers", NOTE, detail))
    return [*found, *_hopper_triton(torch_report, triton)]


def _hopper_triton(torch_report: dict[str, Any], triton: Version | None) -> list[Finding]:
    hopper = [d for d in torch_report.get("devices", []) if (d.get("capability") or [0])[0] == 9]
    low, high = TRITON_WRONG_ON_HOPPER
    if not hopper or triton is None or not low <= Version(triton.base_version) < high:
        return []
    return [Finding(
        "pairs", "Hopper / Triton / FLA", NOTE, f"Triton {triton} miscompiles some blocks of FLA's gated backward on "
        f"{hopper[0]['name']}; each run compares FLA with our rule on its own sizes first",
        f"triton>={high} has the fix",
    )]  # fmt: skip


def torch_findings(report: dict[str, Any]) -> list[Finding]:
    """Devices, backends and operators from the torch probe; ``error`` in it means that torch did not import."""
    if "error" in report:
        fix = "reinstall torch"
        if report.get("without_autoload"):
            fix = (
                "torch itself is fine, a device backend breaks it: set its environment (CANN's set_env.sh), uninstall "
                "torch-npu, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
            )
        return [Finding("devices", "import torch", FAIL, report["error"], fix)]
    found = []
    for index, device in enumerate(report["devices"]):
        detail = device["name"]
        if device["capability"]:
            detail += ", compute capability " + ".".join(str(part) for part in device["capability"])
        found.append(Finding("devices", f"{report['accelerator']}:{index}", OK, detail))
    if not report["devices"]:
        found.append(Finding("devices", "accelerator", NOTE, "none: runs are on CPU over gloo, to try things out"))
    for backend, present in report["backends"].items():
        needed = {"cuda": "nccl", "npu": "hccl"}.get(report["accelerator"], "gloo")
        status = OK if present else FAIL if backend == needed else NOTE
        found.append(Finding("backends", backend, status, "available" if present else "not available"))
    for operator, problem in report["operators"].items():
        found.append(Finding("operators", operator, NOTE if problem else OK, problem or "found"))
    return found


def stack_findings(report: dict[str, Any]) -> list[Finding]:
    """Imports of the training stack, attention implementations, linear attention."""
    found = []
    for name, problem in report.get("imports", {}).items():
        found.append(Finding("imports", name, FAIL if problem else OK, problem or "imports"))
    if "error" in report:
        found.append(Finding("imports", "training stack", FAIL, report["error"]))
    for name, present in report.get("attention", {}).items():
        found.append(Finding("attention", name, OK if present else NOTE, "available" if present else "not available"))
    if "fla" in report:
        where = report["device_type"]
        problem = report["fla"]
        status = OK if problem is None else NOTE if where == "cpu" else WARN
        detail = f"runs on {where}, forward and backward checked"
        if problem is not None:
            detail = f"{problem}: our PyTorch rule instead"
        found.append(Finding("linear attention", "flash-linear-attention", status, detail))
    return found


def exchange_finding(backend: str, report: dict[str, Any]) -> Finding:
    """The two-rank exchange over one backend."""
    name = f"two ranks, {backend}"
    if "error" in report:
        fix = "check that this host's name resolves and that a firewall leaves local ports alone"
        return Finding("exchange", name, FAIL, report["error"], fix if backend == "gloo" else "")
    return Finding("exchange", name, OK, f"uneven all-to-all and all-reduce are right ({report['seconds']:.1f} s)")
