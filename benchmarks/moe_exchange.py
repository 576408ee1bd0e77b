"""One MoE layer over the ep group: every dispatcher's result against float32 without exchange, and its time.

    torchrun --nproc-per-node 2 benchmarks/moe_exchange.py
    torchrun --nproc-per-node 4 benchmarks/moe_exchange.py --ranks-per-node 2     # fused in two stages too

Numbers first (fresh random routing with empty experts, `--check-tokens` a rank), then times on `--tokens` a rank. On
CPU (gloo, float32, `--tiny`) the numbers mean what they say and the times nothing.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist

from benchmarks.moe_block import DEVICE, ON_GPU, Experts, median_ms
from hf_fsdpturbo.dispatch.dispatcher import get_dispatcher
from hf_fsdpturbo.node_groups import make_node_groups


class LocalExperts(Experts):
    """This rank's block; the module's own forward is a loop, as eager needs one."""

    def forward_rows(self, rows_SD, local_expert_S, weight_S):
        from hf_fsdpturbo.compat import grouped_mm

        gate_up, down = (weights.transpose(1, 2) for weights in self.pair)
        multiply = grouped_mm()
        order = torch.argsort(local_expert_S, stable=True)
        counts = torch.zeros(self.num_local_experts, dtype=torch.long, device=rows_SD.device)
        counts.scatter_add_(0, local_expert_S, torch.ones_like(local_expert_S))
        ends = counts.cumsum(0).int()
        gate, up = multiply(rows_SD[order], gate_up, offs=ends).chunk(2, -1)
        out = multiply((torch.nn.functional.silu(gate) * up).contiguous(), down, offs=ends)
        out = torch.empty_like(rows_SD).index_copy(0, order, out)
        return out if weight_S is None else out * weight_S.unsqueeze(-1)


def dispatchers(group, experts, nodes):
    found = {name: get_dispatcher(name)(group, experts) for name in ("eager", "fused", "domino")}
    return found if nodes is None else {**found, "fused, two stages": get_dispatcher("fused")(group, experts, nodes)}


def draw(tokens, top_k, experts, hidden, ffn, rank, dtype):
    """Weights are the same on all ranks, tokens differ. Two experts get nothing."""
    torch.manual_seed(1)
    gate_up = (torch.randn(experts, 2 * ffn, hidden) * 0.05).to(DEVICE, dtype)
    down = (torch.randn(experts, hidden, ffn) * 0.05).to(DEVICE, dtype)
    torch.manual_seed(100 + rank)
    x = torch.randn(tokens, hidden).to(DEVICE, dtype)
    logits = torch.randn(tokens, experts) + torch.linspace(0, 1, experts)
    logits[:, [1, experts - 2]] = float("-inf")
    weights, index = torch.topk(logits.softmax(-1), top_k, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(DEVICE, dtype)
    return x, weights, index.to(DEVICE), gate_up, down, torch.randn(tokens, hidden).to(DEVICE, dtype)


def exact(x, weights, index, gate_up, down, gradient, group):
    """float32, all experts here; expert gradients summed over the group."""
    leaves = [t.float().requires_grad_() for t in (x, weights, gate_up, down)]
    out = torch.zeros_like(leaves[0])
    for expert in range(gate_up.shape[0]):
        token, k = (index == expert).nonzero(as_tuple=True)
        gate, up = (leaves[0][token] @ leaves[2][expert].T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ leaves[3][expert].T
        out = out.index_add(0, token, y * leaves[1][token, k, None])
    out.backward(gradient.float())
    for leaf in leaves[2:]:
        dist.all_reduce(leaf.grad, group=group)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def run(dispatcher, x, weights, index, gate_up, down, gradient):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up, down)]
    experts = LocalExperts(leaves[2], leaves[3])
    out = dispatcher(leaves[0], index, leaves[1], experts)
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--check-tokens", type=int, default=3001)
    parser.add_argument("--ranks-per-node", type=int, default=None, help="real or pretended nodes of this many ranks")
    parser.add_argument("--out", default=None)
    a = parser.parse_args()
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    experts, top_k, hidden, ffn = (8, 2, 32, 16) if a.tiny else (128, 8, 2048, 768)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    local = slice(rank * experts // world, (rank + 1) * experts // world)
    nodes = None
    if a.ranks_per_node is not None:
        bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
        nodes = make_node_groups([range(world)], world // a.ranks_per_node, all_ranks_take_part=bound)
    results = {}
    for seed in range(2):
        x, weights, index, gate_up, down, gradient = draw(
            97 if a.tiny else a.check_tokens + 5 * rank, top_k, experts, hidden, ffn, rank + 10 * seed, dtype
        )
        want = exact(x, weights, index, gate_up, down, gradient, group)
        want[3:] = [t[local] for t in want[3:]]
        for name, dispatcher in dispatchers(group, experts, nodes).items():
            got = run(dispatcher, x, weights, index, gate_up[local], down[local], gradient)
            off = torch.stack([(u.float() - v).norm() / v.norm() for u, v in zip(got, want, strict=True)])
            dist.all_reduce(off, dist.ReduceOp.MAX)
            results.setdefault(name, {}).setdefault("distance", []).append(off.tolist())
    tokens = 256 if a.tiny else a.tokens
    x, weights, index, gate_up, down, gradient = draw(tokens, top_k, experts, hidden, ffn, rank, dtype)
    for name, dispatcher in dispatchers(group, experts, nodes).items():
        leaves = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up[local], down[local])]
        block = LocalExperts(leaves[2], leaves[3])

        def step(dispatcher=dispatcher, leaves=leaves, block=block):
            for leaf in leaves:
                leaf.grad = None
            dispatcher(leaves[0], index, leaves[1], block).backward(gradient)

        results[name]["both_ms"] = fixed_steps_ms(step)
    if rank == 0:
        print(f"one layer, {tokens} tokens a rank, {world} ranks; off float32: out, x, weights, gate_up, down")
        for name, r in results.items():
            worst = torch.tensor(r["distance"]).amax(0).tolist()
            print(f"{name:18s} both {r['both_ms']:7.3f} ms, off " + " ".join(f"{value:.1e}" for value in worst))
        if a.out:
            with open(a.out, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=1)
    dist.destroy_process_group()


def fixed_steps_ms(step, steps=20):
    """Ranks must run the same number of steps, which do_bench does not promise; mean over the run, slowest rank."""
    step()
    if not ON_GPU:
        return median_ms(step)
    for _ in range(3):
        step()
    dist.barrier()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    ms = torch.tensor(start.elapsed_time(end) / steps, device=DEVICE)
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    return ms.item()


if __name__ == "__main__":
    main()
