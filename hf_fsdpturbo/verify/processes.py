"""Ranks and plain processes, forked or fresh; each launch ends at its deadline.

    this process (imports once, does no backward, touches no device)
      |- store      serves the rendezvous, as torchrun does
      |- rank 0..n  one launch; a rank that fails takes the others down GRACE seconds later

A fresh process spends 10 s and more on imports; a forked one starts at once, so each run has ranks of its own and what
takes them down takes no other run with it. On accelerators ranks are fresh (``fresh.py``): CUDA that anything has
started here, an import of bitsandbytes is enough, cannot be used in a fork.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from hf_fsdpturbo.launch_config import CONFIG_VARIABLE, begin_afresh, variable
from hf_fsdpturbo.ranks import FAILURES

GRACE = 3.0  # seconds for the other ranks to say what they know
POLL = 0.02


class ProcessFailed(RuntimeError):
    """A process of a launch failed, died or did not end; the message is for people, ``log`` its last words."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def launch(
    works: Sequence[Callable[[], Any]], folder: Path, seconds: float, *, devices: int, alone: bool, fresh: bool
) -> list[Any]:
    """Run each of ``works`` in a process of its own; what each returned, in order.

    Args:
        works: one a process. Closures will do where processes are forked; fresh ones are sent them by pickle.
        folder: a new one, for logs and results.
        seconds: all of it; then the processes are killed.
        devices: accelerators that ranks share, in turns where they are fewer (which NCCL refuses by itself); 0 leaves
            them alone.
        alone: plain processes that know nothing of each other.
        fresh: new interpreters instead of forks.

    Raises:
        ProcessFailed: the first that failed.
    """
    folder.mkdir(parents=True)
    deadline, world = time.monotonic() + seconds, len(works)
    children: dict[int, int] = {}
    store = None
    try:
        shared = _settings(folder, world, cpu=not devices)
        if alone and devices:  # or plain Trainer would spread each batch over all devices (DataParallel)
            shared["CUDA_VISIBLE_DEVICES"] = (variable("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
        if not alone:
            store, port = _serve_store(seconds)
            shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        start = _start_fresh if fresh else _fork
        for rank, work in enumerate(works):
            local = rank % devices if devices else rank
            own = {} if alone else {"RANK": str(rank), "LOCAL_RANK": str(local)}
            children[start(work, {**shared, **own}, folder, rank, seconds)] = rank
        return _collect(children, world, folder, deadline)
    finally:
        for pid in (*children, *([store] if store else [])):
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


_ASK = """
import torch
torch.empty(1, device=torch.accelerator.current_accelerator())
print("devices:", torch.accelerator.device_count())
"""


def device_count(seconds: float = 120) -> tuple[int, str]:
    """Accelerators of this machine, asked in a process of its own: this one starts none.

    Returns:
        how many there are, and why there is none (a line for people).
    """
    if torch.accelerator.current_accelerator() is None:  # what torch was built for: nothing is started
        return 0, "this build of torch knows none"
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return 0, f"it did not answer within {seconds:g} s"
    count = asked.stdout.rpartition("devices:")[2].strip()
    if asked.returncode or not count.isdecimal():
        return 0, next(iter(asked.stderr.strip().splitlines()[-1:]), f"exit status {asked.returncode}")
    return int(count), ""


def _settings(folder: Path, world: int, *, cpu: bool) -> dict[str, str]:
    """Variables of every child: an accelerate YAML of our own, or the user's default one would be read."""
    file = folder / "accelerate.yaml"
    kind = "MULTI_GPU" if world > 1 else "NO"
    file.write_text(
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: '{kind}'\nnum_processes: {world}\n"
        f"use_cpu: {str(cpu).lower()}\n",
        encoding="utf-8",
    )
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    quiet["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    quiet["NVIDIA_TF32_OVERRIDE"] = "0"  # float32 means float32, in cuDNN too
    return {**quiet, CONFIG_VARIABLE: str(file), **({"ACCELERATE_USE_CPU": "true"} if cpu else {})}


def _serve_store(seconds: float) -> tuple[int, int]:
    """A child that serves the rendezvous store: ``(process, port)``."""
    from torch.distributed import TCPStore

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(seconds) + 10)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds))
        os.write(write, str(store.port).encode())
        os.close(write)
        signal.pause()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        return pid, int(answer.read())


def _fork(work: Callable[[], Any], environment: dict[str, str], folder: Path, rank: int, seconds: float) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        be_child(work, environment, folder, rank, seconds)
    return pid


ENTRY: tuple[str, ...] = ("hf_fsdpturbo.verify.fresh",)
"""Module of a fresh process, and its first words."""


def _start_fresh(work: Callable[[], Any], environment: dict[str, str], folder: Path, rank: int, seconds: float) -> int:
    file = folder / f"{rank}.work"
    with open(file, "wb") as out:
        pickle.dump((sys.path, environment, folder, rank, seconds), out)
        pickle.dump(work, out)
    return os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-m", *ENTRY, str(file)])


def be_child(
    work: Callable[[], Any], environment: dict[str, str], folder: Path, rank: int, seconds: float
) -> NoReturn:
    """A process of a launch: do the work, leave its result or error in ``folder``, end."""
    code = 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (lives as long as the process)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
        signal.alarm(int(seconds) + 10)  # also where the parent is gone
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        begin_afresh(environment)
        torch.set_num_threads(1)  # and so replaces the pool whose threads did not come along
        with open(folder / f"{rank}.result", "wb") as file:
            torch.save(work(), file)
        code = 0
    except FAILURES as error:  # not swallowed: written down, and the exit status says so
        traceback.print_exc()
        (folder / f"{rank}.error").write_bytes(pickle.dumps((type(error).__name__, str(error))))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no teardown: the store outlives us, and gloo's threads need no goodbye


def _collect(children: dict[int, int], world: int, folder: Path, deadline: float) -> list[Any]:
    waiting = dict(children)
    failed: list[tuple[int, int]] = []
    while waiting:
        if time.monotonic() > deadline:
            if not failed:
                raise _late(waiting, folder)
            break
        for pid, rank in list(waiting.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del waiting[pid], children[pid]
                if status:
                    failed.append((rank, status))
                    deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(POLL)
    if failed:
        raise _failure(failed, folder)
    return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(world)]  # our own files


def _failure(failed: list[tuple[int, int]], folder: Path) -> ProcessFailed:
    """What to say: the rank that died, else the first that left a message."""
    dead = [(rank, status) for rank, status in failed if not (folder / f"{rank}.error").exists()]
    if dead:
        rank, status = dead[0]
        how = f"signal {status & 127}" if status & 127 else f"exit status {status >> 8}"
        return ProcessFailed(f"rank {rank} died ({how})", _tail(folder, rank))
    rank = failed[0][0]
    kind, text = pickle.loads((folder / f"{rank}.error").read_bytes())
    return ProcessFailed(f"rank {rank}: {kind}: {text}", _tail(folder, rank))


def _late(waiting: dict[int, int], folder: Path) -> ProcessFailed:
    for pid in waiting:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    ranks = sorted(waiting.values())
    return ProcessFailed(f"ranks {ranks} had not ended at the time limit (--seconds)", _tail(folder, ranks[0]))


def _tail(folder: Path, rank: int, lines: int = 40) -> str:
    file = folder / f"{rank}.log"
    text = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    return "\n".join(text[-lines:])
