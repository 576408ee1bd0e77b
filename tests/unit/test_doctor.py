"""The doctor: known-bad pairs from versions, honest tables here and with a broken torch-npu, children that die."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from hf_fsdpturbo import cli
from hf_fsdpturbo.doctor import checks, probes
from hf_fsdpturbo.doctor import report as doctor
from tests.support.linear_attention_model import install_module

ROOT = Path(__file__).resolve().parents[2]
HOPPER = {"devices": [{"name": "NVIDIA H200", "capability": [9, 0]}]}


def run_doctor(*arguments, path=(), timeout=150):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-m", "hf_fsdpturbo.cli", "doctor", *arguments], capture_output=True, text=True,
        timeout=timeout, env=environment, cwd=ROOT,
    )  # fmt: skip


def installed(monkeypatch, **versions):
    """Only these distributions are installed (underscores stand for dashes)."""
    table = {name.replace("_", "-"): Version(text) for name, text in versions.items()}
    monkeypatch.setattr(checks, "installed_version", table.get)


def names(found, status=None):
    return {finding.name for finding in found if status is None or finding.status == status}


def test_this_machine_is_healthy():
    done = run_doctor("--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert report["ok"]
    by_name = {check["name"]: check for check in report["checks"]}
    assert by_name["torch"]["status"] == by_name["two ranks, gloo"]["status"] == "ok"
    assert by_name["transformers.trainer"]["status"] == by_name["trl"]["status"] == "ok"
    assert {"sdpa", "flash_attention_2", "grouped_mm", "gloo", "flash-linear-attention"} <= by_name.keys()


def broken_torch_npu(folder):
    """torch-npu without CANN: torch loads it by itself at import, and a shared library is missing."""
    package, metadata = folder / "torch_npu", folder / "torch_npu-2.13.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"
    )
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return folder


def test_a_broken_torch_npu_gives_an_honest_table(tmp_path, monkeypatch):
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    done = run_doctor(path=[broken_torch_npu(tmp_path)])
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "FAIL  torch-npu without CANN" in done.stdout
    assert "FAIL  import torch" in done.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout
    assert "torch itself is fine" in done.stdout


@pytest.mark.parametrize(("triton", "status"), [
    ("3.3.1", None), ("3.4.0", "note"), ("3.6.0", "note"), ("3.7.1", None),
])  # fmt: skip
def test_hopper_and_triton(monkeypatch, triton, status):
    installed(monkeypatch, torch="2.11.0", triton=triton)
    found = checks.known_bad_pairs(HOPPER)
    assert [finding.status for finding in found] == ([status] if status else [])
    assert checks.known_bad_pairs({"devices": [{"name": "NVIDIA A100", "capability": [8, 0]}]}) == []


def test_other_known_bad_pairs(monkeypatch):
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    old = {"torch": "2.7.1", "torch_npu": "2.7.1.post4", "triton": "3.2.0", "triton_ascend": "3.2.0"}
    installed(monkeypatch, **old, kernels="0.17.2")
    found = checks.known_bad_pairs({})
    assert names(found, "warn") == {"torch 2.7 over gloo", "triton / triton-ascend"}
    assert names(found, "FAIL") == {"torch-npu without CANN"}
    assert names(found, "note") == {"kernels / transformers"}
    monkeypatch.setenv("ASCEND_HOME_PATH", "somewhere")
    installed(monkeypatch, torch="2.10.0", torch_npu="2.7.1.post4")
    assert names(checks.known_bad_pairs({}), "FAIL") == {"torch-npu / torch"}
    installed(monkeypatch, torch="2.10.0", torch_npu="2.10.0.post2")
    assert checks.known_bad_pairs({}) == []


def test_versions_below_a_floor_fail(monkeypatch):
    installed(monkeypatch, torch="2.6.0", transformers="5.24.0", trl="1.15.0", accelerate="1.15.0")
    assert names(checks.versions(), "FAIL") == {"torch", "trl"}


def test_an_npu_machine_lists_operators_and_needs_hccl():
    report = {
        "accelerator": "npu", "devices": [{"name": "Ascend910_9391", "capability": None}],
        "backends": {"gloo": True, "nccl": False, "hccl": False},
        "operators": {"npu_grouped_matmul": None, "npu_alltoallv_gmm": "missing in torch-npu"},
    }  # fmt: skip
    found = checks.torch_findings(report)
    assert names(found, "FAIL") == {"hccl"}
    assert names(found, "note") == {"nccl", "npu_alltoallv_gmm"}


def test_an_unusable_fla_on_a_gpu_is_a_warning():
    report = {"imports": {"trl": None}, "attention": {"sdpa": True}, "device_type": "cuda", "fla": "Triton is wrong"}
    assert names(checks.stack_findings(report), "warn") == {"flash-linear-attention"}
    assert names(checks.stack_findings({"imports": {"trl": "ImportError: x"}}), "FAIL") == {"trl"}
    assert names(checks.stack_findings({"error": "no answer within 1 s"}), "FAIL") == {"training stack"}


def child(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("code", "words"), [
    ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
    ("import time; time.sleep(60)", "no answer within 2 s"),
    ("raise OSError('libhccl.so')", "OSError: libhccl.so"),
    ("raise SystemExit(3)", "exit code 3 without a word"),
    ("print('hello')", "exit code 0 without a word"),
])  # fmt: skip
def test_every_way_of_dying_becomes_a_sentence(code, words):
    assert probes.finish_probe(child(code), timeout=2) == {"error": words}


def test_a_wrong_exchange_is_a_failure(monkeypatch):
    class Dead:
        pass

    monkeypatch.setattr(doctor, "start_probe", lambda *arguments: Dead())
    answers = iter([{"seconds": 0.1}, {"error": "RuntimeError: rank 1 received zeros"}])
    monkeypatch.setattr(doctor, "finish_probe", lambda process, timeout: next(answers))
    finding = doctor.exchange("gloo", 1.0)
    assert (finding.status, finding.detail) == ("FAIL", "RuntimeError: rank 1 received zeros")


def test_the_table_and_the_exit_code(monkeypatch, capsys):
    found = [checks.Finding("x", "a", "warn", "odd", "do this"), checks.Finding("x", "b", "ok", "fine", "never")]
    monkeypatch.setattr(doctor, "examine", lambda timeout: found)
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "-> do this" in shown
    assert "never" not in shown
    assert "0 failed, 1 warnings, 2 checks" in shown
    found.append(checks.Finding("exchange", "c", "FAIL", "broken"))
    assert cli.main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_command_gets_the_rest_of_the_line(monkeypatch):
    seen = []
    install_module(monkeypatch, "hf_fsdpturbo.commands.export_door", main=lambda arguments: seen.append(arguments))
    assert cli.main(["export", "--checkpoint", "checkpoint-3", "--help"]) == 0
    assert seen == [["--checkpoint", "checkpoint-3", "--help"]]
