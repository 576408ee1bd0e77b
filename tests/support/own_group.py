"""A command in a process group of its own, which ends as a whole where it takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest


def start(folder: Path, *command: str, path: Path | None = None) -> subprocess.Popen[str]:
    """Start a command in ``folder``; ``path`` is its PYTHONPATH, else it has none."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path or "")}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def run(folder: Path, *command: str, path: Path | None = None, timeout: int = 150) -> str:
    """Run a command in ``folder``. The output of both kinds."""
    return finish(start(folder, *command, path=path), timeout)


def finish(process: subprocess.Popen[str], timeout: int = 150) -> str:
    """Wait for a started command; the test fails after ``timeout`` seconds. The output of both kinds."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{process.args} took more than {timeout} s:\n{output[-4000:]}")
    assert process.returncode == 0, output[-6000:]
    return output
