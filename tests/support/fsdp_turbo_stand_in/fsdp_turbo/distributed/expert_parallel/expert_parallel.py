"""expert_parallelize_modules: Shard(0) on ep, and a forward that exchanges rows.

T tokens, K top-k, R received rows, E / L all / local experts, D hidden.
"""

from types import MethodType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_turbo import faults
from fsdp_turbo.utils.str_match import module_name_match
from hf_fsdpturbo.dispatch.row_exchange import all_to_all_rows

KNOWN = {"OLD": ("eager", "fused", "mc2"), "NEW": ("eager", "fused", "mc2", "domino", "moonep")}
SEEN: list[str] = []  # dispatcher names that arrived


def expert_parallelize_modules(modules, ep_mesh, plan):
    if plan.dispatcher not in KNOWN[faults.GENERATION]:
        raise RuntimeError(f"Unsupported dispatcher {plan.dispatcher}.")
    SEEN.append(plan.dispatcher)
    found = [m for n, m in modules.named_modules() if any(module_name_match(p, n) for p in plan.apply_modules)]
    if not found:
        raise RuntimeError("no module matches")
    for module in found:
        _shard(module, ep_mesh)
        module.forward = MethodType(_make_forward(ep_mesh.get_group()), module)
    return modules


def _shard(module, ep_mesh):
    size, rank = ep_mesh.size(), ep_mesh.get_local_rank()
    assert module.num_experts % size == 0
    count = module.num_experts // size
    module.num_local_experts = count
    module.local_expert_indices = list(range(rank * count, (rank + 1) * count))
    if count > 1 and "no_expert_ids" not in faults.FAULTS:
        ids = torch.arange(module.num_experts, dtype=torch.int32) % count
        module.expert_ids_per_ep_rank = torch.zeros_like(ids) if "garbage_ids" in faults.FAULTS else ids
    for name, parameter in list(module.named_parameters(recurse=False)):
        local = parameter.detach()[rank * count : (rank + 1) * count].clone()
        setattr(module, name, nn.Parameter(DTensor.from_local(local, ep_mesh, [Shard(0)])))  # requires_grad forgotten


def _make_forward(group):
    size = dist.get_world_size(group)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        shape = hidden_states.shape
        tokens = hidden_states.reshape(-1, shape[-1])
        flat = top_k_index.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts)
        gathered = [torch.empty_like(counts) for _ in range(size)]
        dist.all_gather(gathered, counts, group=group)
        first = self.local_expert_indices[0]
        received = torch.stack([c[first : first + self.num_local_experts] for c in gathered])
        send, receive = counts.view(size, -1).sum(1).tolist(), received.sum(1).tolist()
        rows = all_to_all_rows(tokens[order // top_k_index.shape[-1]], receive, send, group)
        ids = torch.repeat_interleave(self.expert_ids_per_ep_rank, received.flatten())
        out = all_to_all_rows(_compute(self, rows, ids), send, receive, group)
        back = torch.empty_like(out).index_copy(0, order, out).view(*top_k_index.shape, -1)
        return (back * top_k_weights.unsqueeze(-1)).sum(1).reshape(shape).to(hidden_states.dtype)

    return forward


def _compute(self, rows, ids):
    """Every local expert runs, with however few rows, so that each weight gets a gradient."""
    gate_up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.gate_up_proj, self.down_proj))
    out = torch.zeros_like(rows)
    for expert in range(self.num_local_experts):
        chosen = (ids == expert).nonzero().flatten()
        gate, up = (rows[chosen] @ gate_up[expert].T).chunk(2, -1)
        out = out.index_add(0, chosen, (self.act_fn(gate) * up) @ down[expert].T)
    return out
