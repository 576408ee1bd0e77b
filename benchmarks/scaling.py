"""What grows with the ranks: counts on simulated ones at 8, 64, 256, 1,024, each row with its growth exponent.

    python3 -m benchmarks.scaling                            # counts; half a minute on one core
    python3 -m benchmarks.scaling --threads 72,128,256       # and the start-up check itself on as many threads

The exponent is that of W between the smallest and the largest number of ranks: 0 does not grow, 1 grows with the ranks
(summed over all of them that is 2). Rows in seconds are of this machine; all others are counts.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import pickle
import secrets
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.simulated_ranks import counted_new_groups, fake_world, threaded_ranks
from hf_fsdpturbo.checkpoint import commit, dcp_save, intact
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.parallelize.scale_check import check_gradient_scale
from hf_fsdpturbo.topology import Topology

WORLDS = (8, 64, 256, 1024)
EP_SIZE = RANKS_A_NODE = 8
MODELS = {  # layers with experts, experts, hidden, ffn
    "Qwen3-235B": (94, 128, 4096, 1536),
    "Qwen3-30B": (48, 128, 2048, 768),
    "DeepSeek-V3": (58, 256, 7168, 2048),
}


def exponent(values: list[float], worlds: tuple[int, ...] = WORLDS) -> float:
    """Of W, between the first and the last value; nan where one is nothing."""
    if min(values[0], values[-1]) <= 0:  # no groups where ep is the world
        return 0.0 if values[0] == values[-1] else math.nan
    return math.log(values[-1] / values[0]) / math.log(worlds[-1] / worlds[0])


def meshes(world: int) -> dict[str, float]:
    """F8: building all meshes of a run, on one rank."""
    with fake_world(world - 1, world), counted_new_groups() as made:
        begin = time.perf_counter()
        FSDPTurboParallelState(Topology.resolve(world, ep_size=EP_SIZE), "cpu", None)
        seconds = time.perf_counter() - begin
    return {
        "F8 new_group calls, axes above 1": sum(size > 1 for size in made),
        "F8 new_group calls, axes of 1": sum(size == 1 for size in made),
        "F8 meshes, ms": seconds * 1e3,
    }


def make_checkpoint(run_dir: str, world: int) -> str:
    """A finished checkpoint with as many files as ``world`` ranks write; nothing in them."""
    commit.open_staging(run_dir, "checkpoint-1")
    staged = os.path.join(commit.staging_dir(run_dir), "checkpoint-1")
    os.mkdir(os.path.join(staged, "dcp"))
    for rank in range(world):
        for name in (os.path.join("dcp", f"__{rank}_0.distcp"), f"rng_state_{rank}.pth"):
            with open(os.path.join(staged, name), "wb") as file:
                file.write(bytes(8))
    sync, commit._sync_tree = commit._sync_tree, lambda directory: None  # a disk's time is not what is counted
    try:
        return commit.commit(run_dir, "checkpoint-1", {"step": 1})
    finally:
        commit._sync_tree = sync


def counted(owner: Any, name: str, what: Callable[[], Any], about: str = "") -> int:
    """How often ``what`` calls a function of ``owner`` with a first argument that names ``about``."""
    calls, right = 0, getattr(owner, name)

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += about in str(first)
        return right(first, *args, **kwargs)

    setattr(owner, name, call)
    try:
        what()
    finally:
        setattr(owner, name, right)
    return calls


def files_asked_for(world: int) -> dict[str, float]:
    """F3: questions to the file system before a resume, of rank 0 and of each other rank."""
    with tempfile.TemporaryDirectory() as run_dir:
        checkpoint = make_checkpoint(run_dir, world)
        told: list[Any] = []
        rank, from_rank0 = intact.rank, intact.from_rank0
        intact.from_rank0 = lambda value: told.append(value) or value
        first = counted(os, "stat", lambda: intact.fault_in(checkpoint), checkpoint)
        intact.rank, intact.from_rank0 = lambda: 1, lambda value: told[0]
        other = counted(os, "stat", lambda: intact.fault_in(checkpoint), checkpoint)
        intact.rank, intact.from_rank0 = rank, from_rank0
    return {
        "F3 file stats of verify, rank 0": first,
        "F3 file stats of verify, another rank": other,
        "F3 file stats of verify, all ranks": first + (world - 1) * other,
    }


def scale_check_values(world: int) -> dict[str, float]:
    """F2, on paper: what the start-up check sends at ep = W, where every expert gets a row from every rank."""
    fed = [rank % 7 + 1 for rank in range(world)]
    factors = [expert % 7 + 1 for expert in range(world)]
    return {
        "F2 largest number in the compute dtype, ep = W": max(fed) * max(factors),
        "F2 KiB a rank sends, ep = W, bf16": world * world * 2 / 1024,
    }


def loaders(world: int) -> dict[str, float]:
    """F10: accelerate's loaders; the last rank of all, batches of 2."""
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
    from torch.utils.data import BatchSampler, RandomSampler

    batches = BatchSampler(RandomSampler(range(world * 2 * 20)), 2, False)
    iterator = iter(BatchSamplerShard(batches, num_processes=world, process_index=world - 1))
    next(iterator)
    begin = time.process_time()
    number = sum(1 for _ in iterator)
    seconds = time.process_time() - begin
    read = [0]

    def stream() -> Any:
        for sample in range(world * 4):
            read[0] += 1
            yield sample

    own = iter(IterableDatasetShard(stream(), batch_size=2, num_processes=world, process_index=0))
    next(own), next(own)
    return {
        "F10 map-style: index batches, us a batch": seconds / number * 1e6,
        "F10 stream: samples read for a batch of 2": read[0],
    }


def stacked_parts(model: str, world: int, rank: int) -> list[Any]:
    """What one rank writes of a model's stacked experts and their moments, without the tensors."""
    from hf_fsdpturbo.checkpoint.shard_file import Part
    from hf_fsdpturbo.shards import Box

    parts = []
    layers, experts, hidden, ffn = MODELS[model]
    for layer in range(layers):
        for name, shape in {"gate_up": (experts, 2 * ffn, hidden), "down": (experts, hidden, ffn)}.items():
            rows = experts // EP_SIZE, -(-shape[2] // (world // EP_SIZE))
            offset = rows[0] * (rank % EP_SIZE), 0, min(rows[1] * (rank // EP_SIZE), shape[2])
            box = Box(offset, (rows[0], shape[1], min(rows[1], shape[2] - offset[2])))
            for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq"):
                parts.append(Part(f"{kind}.model.layers.{layer}.mlp.experts.{name}", "torch.bfloat16", shape, box))
    return parts


def index(world: int) -> dict[str, float]:
    """F5: what ranks say of a save, and what rank 0 makes of it; files without tensors in them."""
    from unittest import mock

    from hf_fsdpturbo.checkpoint import shard_file
    from hf_fsdpturbo.checkpoint.dcp_index import parse_index

    numbers = itertools.count()

    def nothing(file: Any, part: Any, tensor: Any) -> Any:
        size = 2 * math.prod(part.box.shape)
        return shard_file.Chunk(part, next(numbers) * size, size, secrets.token_hex(16))

    def write(model: str, rank: int) -> Any:
        parts = [(part, torch.empty(0)) for part in stacked_parts(model, world, rank)]
        path = os.path.join(directory, shard_file.file_name(rank))
        written = shard_file.write_shard(path, "0" * 32, parts)
        sizes[f"F5 KiB of a rank's list, {model} ({len(parts)} keys)"] = os.path.getsize(path) / 1024
        return written

    sizes: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        with mock.patch.object(shard_file, "_write_chunk", nothing), mock.patch.object(os, "fsync"):
            for model in MODELS:
                write(model, 0)
            written = [write("Qwen3-235B", rank) for rank in range(world)]
        began = time.process_time()
        dcp_save.write_index(directory, "0" * 32, written)
        first = time.process_time()
        trailers = counted(dcp_save.ShardFile, "trailer", lambda: dcp_save.write_index(directory, "1" * 32, written))
        later = time.process_time()
        with open(os.path.join(directory, ".metadata"), "rb") as file:
            raw = file.read()
        parsing = time.process_time()
        parse_index(raw, "")
        parsed = time.process_time()
    return {
        **sizes,
        "F5 MiB of lists that rank 0 reads, first save": next(iter(sizes.values())) * world / 1024,
        "F5 lists that rank 0 reads, later saves": trailers,
        "F5 KiB gathered of all ranks": len(pickle.dumps(written)) / 1024,
        "F5 s to make the index, first save": first - began,
        "F5 s to make the index, later saves": later - first,
        "F4 MiB of the index": len(raw) / 2**20,
        "F4 s to read and check the index, one rank a node": parsed - parsing,
    }


def index_reads(world: int) -> dict[str, float]:
    """F4: how often the index is read in a resume; counted in one process, eight ranks a node."""
    from hf_fsdpturbo.checkpoint import dcp, dcp_read

    with tempfile.TemporaryDirectory() as directory:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        shards, described = os.path.join(directory, dcp.DCP_DIR), os.path.join(directory, dcp.OPTIMIZER_JSON)
        dcp_save.save(dcp.gather_state(model, optimizer), shards)
        dcp.write_optimizer_json(model, optimizer, directory)

        def resume() -> None:
            opened = dcp_read.SavedDirectory(shards)
            dcp.load_model(opened, model)
            dcp.load_optimizer(opened, described, model, optimizer)

        reads = counted(dcp_read, "read_index", resume)
    nodes = world // RANKS_A_NODE
    return {"F4 reads of the index in a resume, a node": reads, "F4 the same, all nodes": reads * nodes}


PARTS = (meshes, files_asked_for, scale_check_values, loaders, index_reads, index)


def table() -> str:
    """All rows at all numbers of ranks, in Markdown."""
    rows: dict[str, list[float]] = {}
    for part in PARTS:
        for world in WORLDS:
            for name, value in part(world).items():
                rows.setdefault(name, []).append(value)
    rows["F7 groups and sockets of a background save"] = [0 for _ in WORLDS]
    lines = [f"| what | {' | '.join(map(str, WORLDS))} | exponent |", f"|---|{'---|' * (len(WORLDS) + 1)}"]
    for name, values in rows.items():
        numbers = [
            f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.{1 if value >= 1 else 3}f}"
            for value in values
        ]
        lines.append(f"| {name} | {' | '.join(numbers)} | {exponent(values):.2f} |")
    return "\n".join(lines)


def check_in_threads(world: int) -> float:
    """F2: seconds of the start-up check of a bf16 run at ep = W, with FSDP2 and exchanges that compute."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "reshard_after_forward": True}

    def rank_function(rank: int) -> None:
        state = FSDPTurboParallelState(Topology.resolve(world, ep_size=world), "cpu", None)
        check_gradient_scale(state, options)

    begin = time.perf_counter()
    threaded_ranks(rank_function, world, timeout=600)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="", help="numbers of ranks for the start-up check, comma-separated")
    arguments = parser.parse_args()
    print(table(), flush=True)
    for world in map(int, filter(None, arguments.threads.split(","))):
        print(f"F2 start-up check passes at ep {world}, bf16: {check_in_threads(world):.0f} s in threads", flush=True)


if __name__ == "__main__":
    main()
