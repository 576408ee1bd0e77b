"""A checkpoint by real gloo ranks: what they send each other, open and connect to, as their number grows.

    python3 -m benchmarks.scaling_gloo                       # 2, 4, 8, 16 ranks, as nodes of 4; a minute on two cores
    python3 -m benchmarks.scaling_gloo --ranks 2,4 --layers 4

The state has the tensors of Qwen3-235B's experts and their moments (94 layers, 564 keys), with small widths: none of
these counts depends on widths. Ranks are forked from this process, so that 16 of them fit on a small machine.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import pickle
import socket
import stat
import tempfile
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdpturbo.checkpoint import dcp_read, dcp_save, shard_file
from hf_fsdpturbo.checkpoint.background import BackgroundSave

RANKS_A_NODE = 4


def make_state(layers: int, world: int) -> dict[str, torch.Tensor]:
    """Stacks of 128 experts over half of the ranks, their input dim over two; two replicas of a norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, world // 2))
    state = {}
    for layer in range(layers):
        for name in ("gate_up", "down"):
            for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq"):
                stack = torch.full((128, 2, 2), float(layer))
                placed = distribute_tensor(stack, mesh, [Shard(2), Shard(0)], src_data_rank=None)
                state[f"{kind}.model.layers.{layer}.mlp.experts.{name}"] = placed
        norm, placements = torch.full((2 * world,), 1.0), [Replicate(), Shard(0)]
        state[f"model.layers.{layer}.norm"] = distribute_tensor(norm, mesh, placements, src_data_rank=None)
    return state


def sockets() -> int:
    """Sockets that this process holds."""
    found = 0
    for descriptor in range(4096):
        with contextlib.suppress(OSError):  # not open
            found += stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    return found


def one_rank(rank: int, world: int, folder: str, layers: int, results: Any) -> None:
    """Save, save again, resume, save in the background; counts of this rank."""
    torch.set_num_threads(1)
    socket.gethostname = lambda: f"node{rank // RANKS_A_NODE}"
    store = dist.FileStore(f"{folder}/store", world)  # of no thread, which a fork would lose
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    state = make_state(layers, world)
    counts: Counter[str] = Counter()
    gather, read, enter = dist.all_gather_object, dcp_read.read_index, shard_file.ShardFile.__enter__

    def gathered(values: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        counts["bytes"] += len(pickle.dumps(value))
        return gather(values, value, *args, **kwargs)

    dist.all_gather_object = gathered
    dcp_read.read_index = lambda *args: counts.update(["indexes"]) or read(*args)  # type: ignore[func-returns-value]
    shard_file.ShardFile.__enter__ = (  # type: ignore[method-assign]
        lambda self: counts.update(["files"]) or enter(self)  # type: ignore[func-returns-value]
    )
    row: dict[str, float] = {}
    for name in ("first", "second"):
        counts.clear()
        dist.barrier()
        before, begin = time.process_time(), time.perf_counter()
        dcp_save.save(state, f"{folder}/{name}")
        row[f"CPU s of the {name} save"] = time.process_time() - before
        row[f"seconds of the {name} save"] = time.perf_counter() - begin
        row[f"bytes a rank says, {name} save"] = counts["bytes"]
    counts.clear()
    opened = dcp_read.SavedDirectory(f"{folder}/second")
    opened.read_into(state)
    row["indexes read in a resume"] = counts["indexes"]
    row["files opened in a resume"] = counts["files"]
    row["KiB of the list in a rank's file"] = list_bytes(f"{folder}/second", rank) / 1024
    before_save = sockets()
    background = BackgroundSave(state, f"{folder}/third", timedelta(seconds=60))
    background.then(lambda: None)
    error = background.wait()
    if error is not None:
        raise error
    row["sockets that a background save opens"] = sockets() - before_save
    dist.barrier()
    results.put((rank, row))
    results.close()
    results.join_thread()
    dist.barrier()
    os._exit(0)  # gloo's threads need no goodbye


def list_bytes(directory: str, rank: int) -> int:
    """Bytes of the trailer in a rank's file."""
    with open(os.path.join(directory, shard_file.file_name(rank)), "rb") as file:
        file.seek(-16, os.SEEK_END)
        return int.from_bytes(file.read(8), "little")


def measure(world: int, layers: int) -> list[dict[str, float]]:
    """The rows of all ranks."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=one_rank, args=(rank, world, folder, layers, results)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=150) for _ in processes)
        for process in processes:
            process.join()
    return [found[rank] for rank in range(world)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16")
    parser.add_argument("--layers", type=int, default=94)
    options = parser.parse_args()
    worlds = list(map(int, options.ranks.split(",")))
    rows: dict[str, list[str]] = {}
    for world in worlds:
        found = measure(world, options.layers)
        for name in found[0]:
            values = [row[name] for row in found]
            shown = f"{sum(values):,.0f}" if name.startswith("indexes") else f"{max(values):,.3g}"
            rows.setdefault(f"{name}, {'all ranks' if name.startswith('indexes') else 'worst rank'}", []).append(shown)
    print(f"| {options.layers} layers, real gloo | {' | '.join(map(str, worlds))} |\n|---|{'---|' * len(worlds)}")
    for name, shown in rows.items():
        print(f"| {name} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
