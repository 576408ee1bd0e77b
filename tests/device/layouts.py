"""Tiny runs of every kind on two GPUs over NCCL, each against one plain process: `python -m tests.device.layouts`.

Float32 weights and activations, so that what differs is the layout. A topology is one launch of two ranks with all its
runs, and launches go side by side: the models are tiny. ``--cpu`` is the rehearsal over gloo. A row prints its
worst distance; the exit status says whether all are within tolerance.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_session import cause
from hf_fsdpturbo.verify.random_weights import move_by_half_an_ulp
from tests.support import adapter_runs, preference_runs, reference_run
from tests.support.compare import TOLERANCE, compare, distance
from tests.support.preference_runs import Preference, pairs
from tests.support.records import Record, Run
from tests.support.tiny_models import save_tiny, texts

ROOT = Path(__file__).resolve().parents[2]
ACCUMULATE = {"gradient_accumulation_steps": 2}
RECOMPUTE = {"gradient_checkpointing": True}
BOTH = {**ACCUMULATE, **RECOMPUTE}
ONE_GPU = False  # see tests/support/ranks_on_one_gpu.py
BF16_LOSSES = 1e-3
PACK = {"packing": True, "max_length": 32}
PICTURES = [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]  # on one rank, on none, on the other


def _fields(dispatcher: str | None = None, **sizes: Any) -> dict[str, Any]:
    inner = dict(sizes.pop("dist_config", {}))
    if dispatcher is not None:
        inner["ep_dispatcher"] = dispatcher
    return {**sizes, "dist_config": inner}


# topology -> (ranks, ranks that share a batch, run -> (kind of trainer, family, arguments, hf_fsdpturbo fields))
LAYOUTS: dict[str, tuple[int, int, dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]]]] = {
    "ep2": (2, 1, {
        "eager": ("sft", "qwen3_moe", ACCUMULATE, _fields("eager", ep_size=2)),
        "fused": ("sft", "qwen3_moe", BOTH, _fields("fused", ep_size=2)),
        "domino": ("sft", "qwen3_moe", BOTH, _fields("domino", ep_size=2)),
        "auto": ("sft", "qwen3_moe", PACK, _fields("auto", ep_size=2)),
        "qwen3_5": ("sft", "qwen3_5_moe", RECOMPUTE, _fields(ep_size=2)),
        "gpt_oss": ("sft", "gpt_oss", ACCUMULATE, _fields("fused", ep_size=2)),
    }),
    # plain TRL in bf16 is rounded as much, so only its losses are compared
    "ep2 bf16": (2, 1, {
        "float32 storage": ("sft", "qwen3_moe", {**BOTH, "bf16": True}, _fields("fused", ep_size=2)),
        "bfloat16 storage": ("sft", "qwen3_moe", {**BOTH, "bf16": True},
                             _fields("fused", ep_size=2, dist_config={"param_storage_dtype": "bfloat16"})),
        "float32 storage, domino": ("sft", "qwen3_moe", {**BOTH, "bf16": True}, _fields("domino", ep_size=2)),
        "float32 storage, eager": ("sft", "qwen3_moe", {**BOTH, "bf16": True}, _fields("eager", ep_size=2)),
    }),
    "ep1 bf16": (2, 1, {
        "float32 storage": ("sft", "qwen3_moe", {**BOTH, "bf16": True}, _fields("fused", ep_size=1)),
    }),
    "ep2 preferences": (2, 1, {
        "dpo": ("dpo", "qwen3_moe", BOTH, _fields(ep_size=2)),
        "reward": ("reward", "qwen3_moe", ACCUMULATE, _fields(ep_size=2)),
        "lora": ("lora", "qwen3_moe", BOTH, _fields("fused", ep_size=2)),
    }),
    "ep1 efsdp2": (2, 1, {
        "sft": ("sft", "qwen3_moe", BOTH, _fields("fused", ep_size=1)),
        "eager": ("sft", "qwen3_moe", ACCUMULATE, _fields("eager", ep_size=1)),
    }),
    "edp2": (2, 1, {"sft": ("sft", "qwen3_moe", BOTH, _fields("fused", ep_size=1, dist_config={"efsdp_size": 1}))}),
    "hsdp2": (2, 1, {"sft": ("sft", "qwen3_moe", BOTH, _fields("fused", ep_size=1, mp_replicate_size=2))}),
    "cp2": (2, 2, {
        "sft": ("sft", "qwen3_moe", {**BOTH, "pad_to_multiple_of": 8}, _fields("fused", ep_size=1, cp_size=2)),
        "qwen3_5": ("sft", "qwen3_5_moe", {"pad_to_multiple_of": 8}, _fields(ep_size=1, cp_size=2)),
    }),
    "images": (2, 1, {"ep2": ("images", "qwen3_vl_moe", RECOMPUTE, _fields("fused", ep_size=2))}),
    "images bf16": (2, 1, {"ep2": ("images", "qwen3_vl_moe", {**RECOMPUTE, "bf16": True}, _fields(ep_size=2))}),
    "images cp2": (2, 2, {"cp2": ("images", "qwen3_vl_moe", RECOMPUTE, _fields(ep_size=1, cp_size=2))}),
    "offload": (2, 1, {"sft": ("sft", "qwen3_moe", ACCUMULATE,
                            _fields("fused", ep_size=2, dist_config={"offload_params": True}))}),
    "ep2 efsdp2": (4, 1, {"sft": ("sft", "qwen3_moe", BOTH, _fields("fused", ep_size=2))}),
    "hsdp2 ep2": (4, 1, {"sft": ("sft", "qwen3_moe", BOTH, _fields("fused", ep_size=2, mp_replicate_size=2))}),
    "cp2 ep2": (4, 2, {"sft": ("sft", "qwen3_moe", {**BOTH, "pad_to_multiple_of": 8},
                               _fields("fused", ep_size=2, cp_size=2))}),
    "ep4 on two nodes": (4, 1, {
        "two stages": ("sft", "qwen3_moe", BOTH, _fields("fused", ep_size=4, ranks_per_node=2)),
        "auto": ("sft", "qwen3_moe", ACCUMULATE, _fields("auto", ep_size=4, ranks_per_node=2)),
    }),
}  # fmt: skip


def make_run(kind: str, model: str, args: dict[str, Any], turbo: dict[str, Any], cpu: bool) -> Preference:
    data: Any = pairs(48) if kind in ("dpo", "reward") else {"text": texts(48)}
    more = {"peft_config": adapter_runs.lora()} if kind == "lora" else {}
    trainer = "sft" if kind in ("lora", "images") else kind
    if kind == "images":
        data = str(Path(model).parent / "pictures")
        args = {"train_sampling_strategy": "sequential", "max_length": None, "weight_decay": 0.1, **args}
    args = {"use_cpu": cpu, **args}
    if cpu and "offload_params" in turbo.get("dist_config", {}):
        turbo = {**turbo, "dist_config": {**turbo["dist_config"], "pin_memory": False}}
    with_images = kind == "images"
    return Preference(Run(model, data, args, turbo, trainer=trainer, trainer_kwargs=more, with_images=with_images))


def ranks(folder: Path) -> None:
    """One rank: every run of the topology, one after another; records go to files."""
    jobs = torch.load(folder / "jobs.pt", weights_only=False)
    rank = int(os.environ["RANK"])
    for name, job in jobs.items():
        record = preference_runs.turbo_ranks([job])[0]
        torch.save(record, folder / f"{name}.rank{rank}.pt")
        print(f"{name}: trained", flush=True)


def move_weights(trainer: Any) -> None:
    """Hook: every weight half an ulp away."""
    move_by_half_an_ulp(trainer.model)


def references(folder: Path, world: int, share: int) -> None:
    """One plain process: the stock trainer on the micro-batches that the ranks saw, from the weights and from others.

    The others are half an ulp away: kernels of a GPU choose their order of sums by shapes, and tiny models amplify it.
    """
    for name, job in torch.load(folder / "jobs.pt", weights_only=False).items():
        records = [torch.load(folder / f"{name}.rank{rank}.pt", weights_only=False) for rank in range(world)]
        work = (world // share, reference_run.merge_batches(records[::share]))
        moved = replace(job, run=replace(job.run, before_train=move_weights))
        torch.save(preference_runs.plain_references([(job, *work), (moved, *work)]), folder / f"{name}.plain.pt")


def save_and_move(folder: Path, cpu: bool) -> None:
    """One rank: a checkpoint at ep 2 (or, in a second launch, its resume at ep 1); whole weights go to a file."""
    job: Run = torch.load(folder / "jobs.pt", weights_only=False)["moved"].run
    second = (folder / "saved").exists()
    turbo = {"ep_size": 1 if second else 2}
    args = {**job.args, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = reference_run.build_trainer(
        replace(job, args=args, turbo=turbo, gradients=False), turbo=True, output_dir=str(folder / "run")
    )
    trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2") if second else None)
    weights = reference_run.whole_parameters(trainer.model)
    if int(os.environ["RANK"]) == 0:
        torch.save(weights, folder / ("moved.pt" if second else "straight.pt"))
        (folder / "saved").touch()


def launch(folder: Path, words: list[str], processes: int, cpu: bool, limit: float) -> str | None:
    """Run this module; what it said if it failed."""
    quiet = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}
    python = [sys.executable]
    if processes > 1:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    else:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    if cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    log = folder / f"{words[0].strip('-')}.log"
    module = ["-m", *(["tests.support.ranks_on_one_gpu"] if ONE_GPU and processes > 1 else []), "tests.device.layouts"]
    command = [*python, *module, *words, "--folder", str(folder)] + ["--cpu"] * cpu
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return f"not done after {limit:.0f} s\n{_tail(log)}"
    return None if code == 0 else _tail(log)


def _tail(log: Path) -> str:
    return cause(log.read_text(encoding="utf-8", errors="replace"))


def topology(name: str, folder: Path, cpu: bool, limit: float) -> list[tuple[str, float | None, str]]:
    """Rows (run, worst distance or None, report) of one topology."""
    world, share, runs = LAYOUTS[name]
    folder.mkdir()
    jobs = {
        run: make_run(kind, str(folder.parent / family), args, turbo, cpu)
        for run, (kind, family, args, turbo) in runs.items()
    }
    torch.save(jobs, folder / "jobs.pt")
    said = launch(folder, ["--ranks"], world, cpu, limit)
    said = said or launch(folder, ["--references", f"{world},{share}"], 1, cpu, limit)
    rows: list[tuple[str, float | None, str]] = []
    for run, (kind, *_rest) in runs.items():
        if not (folder / f"{run}.plain.pt").exists():
            rows.append((f"{name}: {run}", None, said or "no record"))
            continue
        record: Record = torch.load(folder / f"{run}.rank0.pt", weights_only=False)
        plain, moved = torch.load(folder / f"{run}.plain.pt", weights_only=False)
        if kind == "lora":
            record, plain, moved = map(adapter_runs.as_peft, (record, plain, moved))
        if "bf16" in name:
            worst = distance(torch.tensor(record.losses), torch.tensor(plain.losses)) / BF16_LOSSES
            rows.append((f"{name}: {run}", worst, "" if worst <= 1 else f"losses {record.losses}, {plain.losses}"))
            continue
        result = compare(record, plain, TOLERANCE, yardstick=moved)
        worst = max(row.distance / row.allowed for row in result.rows)
        rows.append((f"{name}: {run}", worst, "" if result else result.report))
    return rows


def moved(folder: Path, cpu: bool, limit: float) -> list[tuple[str, float | None, str]]:
    """A checkpoint of two steps at ep 2, resumed at ep 1: weights after four as if it had never stopped."""
    folder.mkdir()
    torch.save({"moved": make_run("sft", str(folder.parent / "qwen3_moe"), {}, {}, cpu)}, folder / "jobs.pt")
    said = launch(folder, ["--move"], 2, cpu, limit) or launch(folder, ["--move"], 2, cpu, limit)
    if said is not None:
        return [("checkpoint: ep 2 to ep 1", None, said)]
    straight, resumed = (torch.load(folder / f"{name}.pt") for name in ("straight", "moved"))
    worst = max(float((straight[n] - resumed[n]).norm() / straight[n].norm()) for n in straight)
    return [("checkpoint: ep 2 to ep 1", worst / TOLERANCE, "" if worst <= TOLERANCE else f"weights {worst:.1e} off")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="rehearse over gloo")
    parser.add_argument("--one-gpu", action="store_true", help="both ranks on one GPU, collectives by way of the host")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one launch")
    parser.add_argument("--side-by-side", type=int, default=9, help="topologies at a time")
    parser.add_argument("--only", help="comma list of topologies")
    for name in ("--folder", "--references"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--ranks", "--move"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    global ONE_GPU
    ONE_GPU = a.one_gpu
    if a.ranks:
        return ranks(Path(a.folder)) or 0
    if a.references:
        return references(Path(a.folder), *map(int, a.references.split(","))) or 0
    if a.move:
        return save_and_move(Path(a.folder), a.cpu) or 0
    start = time.monotonic()
    chosen = a.only.split(",") if a.only else [*LAYOUTS, "checkpoint"]
    room = 4 if a.cpu or a.one_gpu else torch.cuda.device_count()
    for name in [name for name in chosen if LAYOUTS.get(name, (2,))[0] > room]:
        print(f"not run: {name} needs {LAYOUTS[name][0]} GPUs, {room} are here (or --one-gpu)")
        chosen.remove(name)
    with tempfile.TemporaryDirectory() as top, concurrent.futures.ThreadPoolExecutor(a.side_by_side) as pool:
        for family in ("qwen3_moe", "qwen3_5_moe", "gpt_oss"):  # before the threads: imports are not made for them
            save_tiny(family, Path(top) / family, **({"layers": 4} if family == "qwen3_5_moe" else {}))
        if any(name.startswith("images") for name in chosen):
            from tests.support.tiny_pictures import save_pictures, save_tiny_vision

            save_tiny_vision(Path(top) / "qwen3_vl_moe")
            save_pictures(Path(top) / "pictures", PICTURES)
        places = [Path(top) / name.replace(" ", "_") for name in chosen]
        work = [
            pool.submit(moved, place, a.cpu, a.limit) if name == "checkpoint" else
            pool.submit(topology, name, place, a.cpu, a.limit)
            for name, place in zip(chosen, places, strict=True)
        ]  # fmt: skip
        rows = [row for one in work for row in one.result()]
    for _, _, report in rows:
        if report:
            print(report + "\n" + "-" * 40)
    for name, worst, _ in rows:
        print(f"| {name} | {'failed' if worst is None else f'{worst:.2f} of what is allowed'} |")
    bad = [name for name, worst, _ in rows if worst is None or worst > 1]
    print(f"{len(rows) - len(bad)} of {len(rows)} right, {time.monotonic() - start:.0f} s; not right: {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
