"""expert_fully_shard_modules: FSDP2 on the experts with a fixed bf16 policy."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from fsdp_turbo import faults
from fsdp_turbo.utils.str_match import module_name_match

WRAPPED: list[str] = []


def expert_fully_shard_modules(model, efsdp_mesh, ep_plan, fsdp_plan):
    assert set(vars(fsdp_plan)) >= {"hook_modules", "apply_modules", "fsdp_implementation", "cpu_offload"}
    if "sync_collectives" in faults.FAULTS:
        _wait_for_everything()
    if "skip_size_one" in faults.FAULTS and efsdp_mesh.size() == 1:
        return model
    patterns = ep_plan.apply_efsdp_modules
    if "moe_block" in faults.FAULTS:
        patterns = [pattern.removesuffix(".experts") for pattern in patterns]
    factor = getattr(ep_plan, "gradient_divide_factor", None) or getattr(ep_plan, "_gradient_divide_factor", None)
    for name, module in list(model.named_modules()):
        if any(module_name_match(pattern, name) for pattern in patterns):
            WRAPPED.append(name)
            fully_shard(
                module, mesh=efsdp_mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
                shard_placement_fn=lambda p: Shard(1) if p.ndim >= 2 else Shard(0),
            )  # fmt: skip
            if factor is not None and "no_divide_factor" not in faults.FAULTS:
                module.set_gradient_divide_factor(factor)
    return model


def _wait_for_everything():
    for name in ("all_reduce", "reduce_scatter", "reduce_scatter_tensor"):
        original = getattr(dist, name)

        @functools.wraps(original)
        def waiting(*args, original=original, **kwargs):
            handle = original(*args, **kwargs)
            if handle is not None:
                handle.wait()
            return handle

        setattr(dist, name, waiting)
