"""N gloo ranks that run one function: forked from a server that has imported everything once, killed at a deadline.

The rendezvous store lives in the calling process on a port the system picks, so two spawns never collide. Ranks are
fresh processes, so every singleton (accelerate's state, our parallel state) is fresh too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
BASE_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "ACCELERATE_USE_CPU": "true",
}
SERVER_START = 240  # seconds for the imports of the fork server, on a busy machine
GRACE = 0.5  # seconds that the other ranks get to finish or fail after the first failure


class RankError(RuntimeError):
    """A rank failed. ``rank``, ``kind`` (exception class name) and ``text`` (its message) say who and what."""

    def __init__(self, rank: int, kind: str, text: str, report: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {text}\n{report}")
        self.rank, self.kind, self.text = rank, kind, text


class RankTimeout(RankError):
    """A rank was still running at the deadline; the report holds every unfinished rank's stack."""


def _fork_server() -> Any:
    """Context whose fork server has imported the preload module. It takes the environment of its first use."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    return context


@contextlib.contextmanager
def _environment(values: dict[str, str | None]):
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def start_fork_server() -> None:
    """Begin the imports early, in the background (a session fixture calls this)."""
    from multiprocessing.forkserver import ensure_running

    _fork_server()
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    with _environment({**BASE_ENVIRONMENT, "PYTHONPATH": path}):
        ensure_running()


# Note [Torch's thread pool after a fork]
# The fork server has run torch operations, so a rank inherits a pool whose threads did not come along. The first call
# that asks for the pool replaces it, in two steps; a second thread that asks in between (the loader of Transformers
# reads files in threads) finds none and fails: "pool INTERNAL ASSERT FAILED ... Invalid thread pool" (seen in one
# spawn of forty). So the main thread asks first.


def _child(
    module: str, name: str, args_blob: bytes, environment: dict[str, str], log_path: str, pipe: Connection
) -> None:
    multiprocessing.set_start_method("fork", force=True)  # else tqdm's lock is a named semaphore that outlives us
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (lives as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    for variable in [v for v in os.environ if v.startswith(("FSDPTURBO_", "ACCELERATE_", "TORCHELASTIC_"))]:
        del os.environ[variable]
    os.environ.update(environment)
    try:
        # See Note [Torch's thread pool after a fork].
        import torch

        torch.set_num_threads(torch.get_num_threads())
        sys.modules.setdefault("matplotlib", None)  # a picture at the end of every run would cost a second each
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        message = ("result", pickle.dumps(function(*pickle.loads(args_blob))))
    except BaseException as error:  # noqa: BLE001  (reported to the parent, whatever it is)
        message = ("error", type(error).__name__, str(error), traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(pickle.dumps(message))
    os._exit(0)  # no teardown: the store outlives us, gloo's threads need no goodbye


def _tail(path: str, lines: int = 40) -> str:
    text = Path(path).read_text(encoding="utf-8", errors="replace").splitlines() if os.path.exists(path) else []
    return "\n".join(text[-lines:])


class _Ranks:
    """The running children of one call."""

    def __init__(
        self, module: str, name: str, blobs: list[bytes], environments: list[dict[str, str]], folder: str
    ) -> None:
        context = _fork_server()
        self.processes: list[Any] = []
        self.pipes: dict[Connection, int] = {}
        self.logs = [os.path.join(folder, f"rank{rank}.log") for rank in range(len(environments))]
        for rank, environment in enumerate(environments):
            receive, send = context.Pipe(duplex=False)
            arguments = (module, name, blobs[rank], environment, self.logs[rank], send)
            process = context.Process(target=_child, args=arguments, daemon=True)
            process.start()
            send.close()
            self.processes.append(process)
            self.pipes[receive] = rank

    def collect(self, deadline: float) -> list[Any]:
        waiting, results = dict(self.pipes), {}
        failure: RankError | None = None
        while waiting:
            left = deadline - time.monotonic()
            ready = wait(list(waiting), timeout=max(left, 0))
            if not ready:
                if failure is not None:
                    raise failure
                raise self._timeout(sorted(waiting.values()))
            for pipe in ready:
                rank = waiting.pop(pipe)
                outcome = self._receive(pipe, rank)
                if isinstance(outcome, RankError):
                    failure = failure or outcome
                    deadline = min(deadline, time.monotonic() + GRACE)
                else:
                    results[rank] = outcome[0]
        if failure is not None:
            raise failure
        return [results[rank] for rank in range(len(self.processes))]

    def _receive(self, pipe: Connection, rank: int) -> RankError | tuple[Any]:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except EOFError:
            self.processes[rank].join(1)
            code = self.processes[rank].exitcode
            return RankError(rank, "Died", f"exit code {code}", f"--- its output:\n{_tail(self.logs[rank])}")
        if message[0] == "result":
            return (pickle.loads(message[1]),)
        _, kind, text, report = message
        return RankError(rank, kind, text, f"{report}\n--- last output of rank {rank}:\n{_tail(self.logs[rank], 15)}")

    def _timeout(self, ranks: list[int]) -> RankTimeout:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = "\n".join(f"--- rank {rank}:\n{_tail(self.logs[rank])}" for rank in ranks)
        return RankTimeout(ranks[0], "Timeout", f"ranks {ranks} had not finished", stacks)

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(5)
        for pipe in self.pipes:
            pipe.close()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``function(*args)`` on ``world_size`` ranks; returns what each rank returned, in rank order.

    Args:
        function: importable by module and name (not a lambda, not a local function).
        world_size: number of ranks; the function or its trainer initialises torch.distributed (``init_gloo`` does).
        args: pickled to every rank.
        timeout: seconds for everything, starting included; at the deadline the ranks are killed.
        env: further environment variables of the ranks.

    Raises:
        RankError: the first rank that failed, with its traceback.
        RankTimeout: not finished at the deadline, with every unfinished rank's stack.
    """
    from torch.distributed import TCPStore

    # As torchrun does: the store is served here, ranks are only its clients.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    environments = [
        {**BASE_ENVIRONMENT, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})}
        for rank in range(world_size)
    ]
    return _run(function, environments, [args] * world_size, timeout)


def run_plain(function: Callable[..., Any], *args: Any, timeout: float = 60, env: dict[str, str] | None = None) -> Any:
    """Run ``function(*args)`` in one fresh process without any launcher's variables; returns its result."""
    return _run(function, [{**BASE_ENVIRONMENT, **(env or {})}], [args], timeout)[0]


def run_plain_jobs(function: Callable[[list[Any]], list[Any]], jobs: list[Any], timeout: float = 60) -> list[Any]:
    """``run_plain(function, jobs)``, the jobs dealt out to two plain processes that know nothing of each other.

    Args:
        function: takes a list of jobs and returns a list of as many results.
        jobs: independent of each other.
        timeout: seconds for all of them.
    """
    hands = [jobs[start::2] for start in range(min(2, len(jobs)))]
    results = _run(function, [dict(BASE_ENVIRONMENT) for _ in hands], [(hand,) for hand in hands], timeout)
    return [results[index % 2][index // 2] for index in range(len(jobs))]


@functools.cache
def _wait_for_server() -> None:
    """Not counted against anybody's timeout: the first process of a session waits for the server's imports."""
    start_fork_server()
    process = _fork_server().Process(target=int, daemon=True)
    process.start()
    process.join(SERVER_START)
    if process.exitcode != 0:
        raise RuntimeError(f"The fork server did not start within {SERVER_START} s (exit code {process.exitcode}).")


def _run(
    function: Callable[..., Any], environments: list[dict[str, str]], args: list[tuple[Any, ...]], timeout: float
) -> list[Any]:
    _wait_for_server()
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        blobs = [pickle.dumps(one) for one in args]
        ranks = _Ranks(function.__module__, function.__qualname__, blobs, environments, folder)
        try:
            return ranks.collect(deadline)
        finally:
            ranks.kill()


def init_gloo(timeout: float = 30) -> None:
    """For rank functions without a trainer: the default process group, with a timeout shorter than the spawn's."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
