"""What the doctor looks at inside a child process, where a broken package can crash alone.

A probe prints one JSON object as its last line. ``run_probe`` starts one with a hard timeout and turns every way of
dying into {"error": ...}.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])  # so that a child finds this package wherever it was imported from
NPU_OPERATORS = (
    "npu_moe_token_permute", "npu_moe_token_unpermute", "npu_grouped_matmul", "npu_swiglu", "npu_rms_norm",
    "npu_rotary_mul", "npu_fusion_attention", "npu_alltoallv_gmm", "npu_gmm_alltoallv",
)  # fmt: skip


def start_probe(name: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a probe in its own session (so that it can be killed with what it started)."""
    code = f"import sys; sys.path.insert(0, {ROOT!r}); from hf_fsdpturbo.doctor import probes; probes.main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, name, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def finish_probe(process: subprocess.Popen[str], timeout: float) -> dict[str, Any]:
    """Its JSON, or {"error": one line}: an exception, a signal, no answer in ``timeout`` seconds."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"no answer within {timeout:.0f} s"}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode == 0 and lines:
        report: dict[str, Any] = json.loads(lines[-1])
        return report
    if process.returncode < 0:
        return {"error": f"killed by signal {-process.returncode}"}
    words = [line.strip() for line in err.splitlines() if line.strip()]
    return {"error": words[-1] if words else f"exit code {process.returncode} without a word"}


def run_probe(name: str, *arguments: str, timeout: float) -> dict[str, Any]:
    """Start a probe and wait for it."""
    return finish_probe(start_probe(name, *arguments), timeout)


def _import_problem(module: str) -> str | None:
    """Why a module does not import, in one line. Any exception counts: this runs in a child, to be reported."""
    try:
        importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001  (a probe reports whatever a broken package raises)
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None


def _accelerator() -> str:
    """Device type of this machine's accelerator, "cpu" without one."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device.type if device is not None else "cpu"


def probe_import() -> dict[str, Any]:
    """Only ``import torch``."""
    importlib.import_module("torch")
    return {}


def probe_torch() -> dict[str, Any]:
    """Accelerator, devices, backends of torch.distributed, operators that the dispatchers and kernels use."""
    import torch
    import torch.distributed as dist

    from hf_fsdpturbo import compat

    kind = _accelerator()
    devices = []
    for index in range(torch.accelerator.device_count() if kind != "cpu" else 0):
        module = torch.get_device_module(kind)
        capability = list(module.get_device_capability(index)) if kind == "cuda" else None
        devices.append({"name": module.get_device_name(index), "capability": capability})
    backends = {name: dist.is_available() and dist.is_backend_available(name) for name in ("gloo", "nccl", "hccl")}
    operators: dict[str, str | None] = {
        "grouped_mm": None if compat.grouped_mm_path() else "needs torch>=2.8: eager experts instead",
        "triton": _import_problem("triton"),
    }
    if kind == "npu":
        from hf_fsdpturbo.ops.npu import load_torch_npu

        npu = load_torch_npu()
        operators |= {name: None if getattr(npu, name, None) else "missing in torch-npu" for name in NPU_OPERATORS}
    return {"accelerator": kind, "devices": devices, "backends": backends, "operators": operators}


def probe_stack() -> dict[str, Any]:
    """The training stack's imports, attention implementations, and whether FLA runs and is right on this device."""
    imports = {name: _import_problem(name) for name in ("accelerate", "transformers.trainer", "trl")}
    if any(imports.values()):
        return {"imports": imports}
    import torch
    from transformers.utils import is_flash_attn_2_available

    from hf_fsdpturbo.kernels import fla
    from hf_fsdpturbo.kernels.fla_trial import TrialSizes, trial

    kind = _accelerator()
    attention = {
        "sdpa": True,
        "flash_attention_2": bool(is_flash_attn_2_available()),
        "flex_attention": _import_problem("torch.nn.attention.flex_attention") is None,
    }
    problem = fla.why_not(kind) or trial(torch.device(kind), TrialSizes())[0]
    return {"imports": imports, "attention": attention, "device_type": kind, "fla": problem}


def probe_exchange(backend: str, rank: str, store: str) -> dict[str, Any]:
    """One of two ranks: an uneven all-to-all with an empty block, and an all-reduce."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from hf_fsdpturbo import compat

    compat.let_gloo_finish_at_exit()
    start, me = time.perf_counter(), int(rank)
    device = torch.device("cpu")
    if backend != "gloo":
        device = torch.device(_accelerator(), me)
        torch.accelerator.set_device_index(me)
    dist.init_process_group(
        backend, store=dist.FileStore(store, 2), rank=me, world_size=2, timeout=timedelta(seconds=30)
    )
    send = [[1, 2], [0, 3]][me]  # rows for rank 0, rows for rank 1
    receive = [[1, 0], [2, 3]][me]
    rows = torch.full((sum(send), 2), float(me + 1), device=device)
    received = rows.new_empty(sum(receive), 2)
    dist.all_to_all_single(received, rows, receive, send)
    total = torch.full((4,), float(me + 1), device=device)
    dist.all_reduce(total)
    expected = torch.cat([torch.full((n, 2), float(source + 1)) for source, n in enumerate(receive)])
    if not torch.equal(received.cpu(), expected) or not torch.equal(total.cpu(), torch.full((4,), 3.0)):
        raise RuntimeError(f"rank {me} received {received.tolist()} for {expected.tolist()}, {total.tolist()} for 3")
    return {"seconds": time.perf_counter() - start}


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "import": probe_import,
    "torch": probe_torch,
    "stack": probe_stack,
    "exchange": probe_exchange,
}


def main() -> None:
    """Entry of the child: ``NAME [ARGUMENTS]``."""
    name, *arguments = sys.argv[1:]
    print(json.dumps(PROBES[name](*arguments)), flush=True)
