"""One rank of a run with the fsdp_turbo stand-in: EP and EFSDP through our adapter (or as published), one backward.

Dense parameters stay replicated and are averaged by hand, so that only the experts' path is under test.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

STAND_IN = Path(__file__).parent / "fsdp_turbo_stand_in"
VOCAB = 64


def configure(generation: str = "NEW", faults: tuple[str, ...] = ()) -> Any:
    """Make `import fsdp_turbo` find the stand-in, one generation with some faults. Returns its fault module."""
    if str(STAND_IN) not in sys.path:
        sys.path.insert(0, str(STAND_IN))
    from fsdp_turbo import faults as module

    module.configure(generation, faults)
    return module


def micro_batch(rank: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(100 + rank))


def model_and_names(num_experts: int) -> tuple[Any, list[str]]:
    from tests.support.tiny_models import tiny_model

    model = tiny_model("qwen3_moe", num_experts=num_experts, vocab_size=VOCAB)
    return model, [name for name, _ in model.named_modules() if name.endswith(".experts")]


def loss_of(model: Any, rank: int) -> torch.Tensor:
    ids = micro_batch(rank)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def reference(world_size: int, num_experts: int) -> dict[str, torch.Tensor]:
    """Gradients of one process: the mean of the ranks' losses."""
    model, _ = model_and_names(num_experts)
    for rank in range(world_size):
        (loss_of(model, rank) / world_size).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def options(bf16: bool) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    return {"mp_policy": policy, "reshard_after_forward": True}


def train(sizes: dict[str, int], num_experts: int, how: dict[str, Any]) -> dict[str, Any]:
    """how: generation, faults, bf16, frozen (fqn part that is frozen), published (without the adapter), efsdp."""
    from hf_fsdpturbo.arguments import FSDPTurboParams
    from hf_fsdpturbo.parallel_state import FSDPTurboParallelState, Topology
    from tests.support.spawn import init_gloo

    init_gloo()
    configure(how.get("generation", "NEW"), tuple(how.get("faults", ())))
    topology = Topology.resolve(dist.get_world_size(), **sizes)
    state = FSDPTurboParallelState.initialize(topology, "cpu")
    model, names = model_and_names(num_experts)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not how.get("frozen") or how["frozen"] not in name)
    before = {name: getattr(dist, name) for name in ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")}
    factor = topology.dp_size * topology.cp_size
    params = FSDPTurboParams(ep_size=topology.ep_size, ep_backend="fsdp_turbo")
    notes: list[str] = []
    if how.get("published"):
        _as_published(model, names, state, how["efsdp"])
    else:
        from hf_fsdpturbo.sharding import fsdp_turbo

        notes += fsdp_turbo.check_upstream(params, model, "cpu")
        fsdp_turbo.expert_parallelize(
            model, names, state.ep_mesh, dispatcher="eager", divide_factor=factor, device=torch.device("cpu")
        )
        notes += fsdp_turbo.expert_fully_shard(
            model, names, state.expert_fsdp_mesh, params=params, divide_factor=factor,
            num_local_experts=num_experts // topology.ep_size, options=options(how.get("bf16", False)),
        )  # fmt: skip
    loss_of(model, dist.get_rank()).backward()
    gradients = {name: _whole(p, factor) for name, p in model.named_parameters() if p.grad is not None}
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    kept = all(getattr(dist, name) is function for name, function in before.items())
    return {"gradients": gradients, "notes": notes, "trainable": trainable, "collectives_kept": kept}


def _as_published(model: Any, names: list[str], state: Any, efsdp: bool) -> None:
    """What LlamaFactory's plugin does with the library: no factor of its own where EFSDP is skipped."""
    from fsdp_turbo.distributed.expert_parallel.expert_fully_shard_parallel import expert_fully_shard_modules
    from fsdp_turbo.distributed.expert_parallel.expert_parallel import expert_parallelize_modules
    from fsdp_turbo.fsdp_turbo_config import EPPlanConfig, FSDPPlanConfig

    plan = EPPlanConfig(apply_modules=names, apply_efsdp_modules=names, dispatcher="eager")
    expert_parallelize_modules(model, state.ep_mesh, plan)
    if efsdp:
        expert_fully_shard_modules(model, state.expert_fsdp_mesh, plan, FSDPPlanConfig(apply_modules={}))


def _whole(parameter: torch.nn.Parameter, ranks: int) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    dist.all_reduce(gradient)  # dense parameters of this test: plain data parallelism
    return gradient / ranks
