"""What planning a Hub export costs at real sizes: seconds of one core, host memory, bytes and messages between ranks.

    python benchmarks/export_planning.py                       # Qwen3-235B-A22B and DeepSeek-V3, 8 to 1,024 ranks
    python benchmarks/export_planning.py --ranks 1024 --model Qwen3-235B-A22B

Models are on meta; nothing is read or written. Ranks are simulated in this process: every rank's boxes are worked out
here and handed over where ranks exchange them. Experts lie over ``ep`` and, within it, over ``efsdp``, which cuts the
input dim; all other weights lie over all ranks. Messages are those that bring rows to their writers.
"""

from __future__ import annotations

import argparse
import pickle
import time
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_fsdpturbo.checkpoint import hub, hub_plan, layouts
from hf_fsdpturbo.checkpoint.rank_tensors import RankTensors
from hf_fsdpturbo.shards import Box

MODELS: dict[str, tuple[Any, Any]] = {
    "Qwen3-235B-A22B": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            num_hidden_layers=94, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536,
            num_experts=128, num_experts_per_tok=8, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
            vocab_size=151936,
        ),
    ),
    "DeepSeek-V3": (DeepseekV3ForCausalLM, DeepseekV3Config()),
}  # fmt: skip
EP = {8: 8, 64: 64, 256: 64, 1024: 64}
FILE_BYTES = 5 * 10**9


def peak_mebi() -> float:
    """Highest resident memory of this process so far."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def boxes_of(tensor: Tensor, world: int) -> list[Box]:
    """Boxes of all ranks, by the rules above."""
    if tensor.ndim == 0:
        return [Box((), ())] * world
    if tensor.ndim < 3:
        return [_cut(tensor, {0: (rank, world)}) for rank in range(world)]
    ep = EP[world]
    return [_cut(tensor, {0: (rank % ep, ep), 2: (rank // ep, world // ep)}) for rank in range(world)]


def _cut(tensor: Tensor, places: dict[int, tuple[int, int]]) -> Box:
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    for dim, (place, parts) in places.items():
        step = -(-tensor.shape[dim] // parts)
        offset[dim] = min(place * step, tensor.shape[dim])
        shape[dim] = max(min(step, tensor.shape[dim] - offset[dim]), 0)
    return Box(tuple(offset), tuple(shape))


def simulated(tensors: dict[str, Tensor], world: int) -> tuple[RankTensors, int]:
    """The source of an export as rank 0 has it, and the bytes that all ranks together would have gathered."""
    kinds = list(dict.fromkeys(tuple(tensor.shape) for tensor in tensors.values()))
    spread = {kind: boxes_of(torch.empty(kind, device="meta"), world) for kind in kinds}
    gathered = 0

    def everyone(mine: Any) -> list[Any]:
        nonlocal gathered
        gathered = len(pickle.dumps(mine)) * world
        return [(mine[0], [spread[kind][rank] for kind in kinds]) for rank in range(world)]

    with (
        mock.patch.object(layouts, "everyone", everyone),
        mock.patch.object(layouts, "local_box", lambda tensor: spread[tuple(tensor.shape)][0]),
    ):
        return RankTensors(tensors), gathered


def messages(jobs: list[hub_plan.Job], source: RankTensors) -> int:
    """Point-to-point messages of the whole export."""
    count = 0
    known: dict[Any, int] = {}
    for job in jobs:
        for name in job.sources:
            layout, tensor = source.layouts[name], source.tensors[name]
            if tensor.ndim == 0:
                continue
            chunks = hub._chunks([tensor]) if job.verbatim else [(0, tensor.shape[0])]
            for start, stop in [(job.row, job.row + 1)] if job.row is not None else chunks:
                key = (id(layout), start, stop, job.writer)
                if key not in known:
                    holders = [owners for _, owners in layout.overlapping(start, stop)]
                    known[key] = sum(job.writer not in owners for owners in holders)
                count += known[key]
    return count


def measure(name: str, world: int, model: Any, tensors: dict[str, Tensor]) -> str:
    """One line of the table."""
    before, times = peak_mebi(), [time.process_time()]
    jobs = hub_plan.make_jobs(model, tensors)
    times.append(time.process_time())
    source, gathered = simulated(tensors, world)
    times.append(time.process_time())
    owners = hub._owners(jobs, source)
    times.append(time.process_time())
    hub_plan.assign_writers(jobs, owners, world)
    times.append(time.process_time())
    files = hub_plan.lay_out(jobs, FILE_BYTES)
    times.append(time.process_time())
    memory = peak_mebi() - before
    steps = " ".join(f"{stop - start:7.2f}" for start, stop in zip(times, times[1:], strict=False))
    return (
        f"{name:16} {world:5} {len(jobs):6} {len(files):5} {steps} {times[-1] - times[0]:7.2f} {memory:8.0f} "
        f"{gathered / 2**20:8.2f} {messages(jobs, source):10,}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="*", default=list(MODELS))
    parser.add_argument("--ranks", type=int, choices=EP, nargs="*", default=list(EP))
    options = parser.parse_args()
    steps = "  names layouts  owners writers   files     all"
    print(f"{'model':16} ranks   jobs files {steps} more MiB gathered   messages")
    for name in options.model:
        model_class, config = MODELS[name]
        with torch.device("meta"):
            model = model_class(config)
        tensors = {key: tensor.to(torch.bfloat16) for key, tensor in model.state_dict().items()}
        for world in options.ranks:
            print(measure(name, world, model, tensors), flush=True)


if __name__ == "__main__":
    main()
