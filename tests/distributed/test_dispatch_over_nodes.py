"""The exchange in two stages against one process: 16 ranks as 2, 4 and 8 nodes, bytes counted, faults put back."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from benchmarks.dispatch_bytes import rows_away, step_bytes
from hf_fsdpturbo.dispatch import auto, fused, node_plan
from hf_fsdpturbo.dispatch.auto import ONE_STAGE
from hf_fsdpturbo.dispatch.packed_rows import PackedLayout
from hf_fsdpturbo.dispatch.recompute import tape_contexts
from hf_fsdpturbo.ops import npu
from hf_fsdpturbo.ops import torch as plain_ops
from hf_fsdpturbo.ops.table import Routing
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.sharding.expert_parallel import shard_experts
from hf_fsdpturbo.topology import Topology
from tests.distributed.test_dispatchers import HIDDEN, TOLERANCE, all_inputs, compare, make_dispatcher, qwen_experts
from tests.support import npu_stand_in
from tests.support.spawn import init_gloo, run_ranks

RANKS = 16
# layout -> sizes of the sixteen ranks; its name is nodes of an ep group x the group's ranks on each
LAYOUTS = {
    "2 x 4": {"ep_size": 8, "ranks_per_node": 4},
    "4 x 4": {"ep_size": 16, "ranks_per_node": 4},
    "8 x 2": {"ep_size": 16, "ranks_per_node": 2},
    "2 x 4, cp 2": {"ep_size": 8, "cp_size": 2, "ranks_per_node": 8},
}
# corner -> (tokens of each rank, repeated, K, E, kind of routing)
CORNERS = {
    "random": ([7, 4, 5], 4, 32, "random"),
    "ranks without tokens": ([6, 0, 0], 3, 32, "random"),
    "no tokens anywhere": ([0], 2, 16, "random"),
    "one token": ([1, *[0] * 15], 8, 16, "random"),
    "all tokens to one expert": ([4, 3], 1, 16, "first"),
    "all tokens to the last expert": ([4, 3], 1, 16, "last"),
    "all tokens to a quarter of the ranks": ([4, 3], 4, 32, "first node"),  # one node of "4 x 4"
    "all experts on the token's own rank": ([4, 0, 3], 2, 32, "own"),
    "top-k 1": ([6, 5], 1, 32, "random"),
    "one expert a rank": ([5, 4], 3, 16, "random"),
    "K == E": ([3, 2], 16, 16, "random"),
}
A_FEW = ["random", "ranks without tokens", "top-k 1", "K == E"]
EVEN = ([4], 16, 16, "random")  # every token goes to every rank, so a fault leaves the number of rows as it is
COUNTED_IN = ("2 x 4", "4 x 4")
COUNTED = ([9, 5, 0, 7], 4, 32, "random")


def parity(state, case, **how):
    return compare("fused", case, mesh=state.ep_mesh, nodes=state.ep_nodes, **how)


def corners_of(layout, state):
    names = CORNERS if layout in ("2 x 4", "4 x 4") else A_FEW
    found = {name: parity(state, CORNERS[name]) for name in names}
    if layout == "4 x 4":
        found["other experts"] = parity(state, CORNERS["random"], module_name="gpt_oss")
        found["frozen"] = parity(state, CORNERS["random"], frozen=True)
        found["domino"] = compare("domino", CORNERS["random"], mesh=state.ep_mesh, nodes=state.ep_nodes)
        with replaced(auto, "ROUNDS", 1), replaced(auto, "WARM_UP", 0):
            found["auto"] = compare("auto", CORNERS["random"], mesh=state.ep_mesh, nodes=state.ep_nodes)
        npu_stand_in.install()
        with replaced(fused, "get_ops", lambda device_type: npu):
            found["Ascend operators"] = parity(state, CORNERS["random"])
            found["Ascend operators, K == E"] = parity(state, CORNERS["K == E"])
    return found


@contextlib.contextmanager
def replaced(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


class Counter:
    """Counts what ``all_to_all_single`` carries: calls of integers and of rows, and bytes of rows to other nodes."""

    def __init__(self, ranks_per_node):
        self.near, self.calls, self.bytes_away = ranks_per_node, {"counts": 0, "rows": 0}, 0
        self.exchange = dist.all_to_all_single

    def __call__(self, output, rows, output_splits=None, input_splits=None, group=None):
        self.calls["rows" if rows.is_floating_point() else "counts"] += 1
        if rows.is_floating_point():
            for rank, count in zip(dist.get_process_group_ranks(group), input_splits, strict=True):
                if rank // self.near != dist.get_rank() // self.near:
                    self.bytes_away += count * rows.shape[1] * rows.element_size()
        return self.exchange(output, rows, output_splits, input_splits, group=group)


def one_layer(state, name, checkpointed=False):
    """Forward and backward of one layer: what was exchanged, the output and the gradient of the rows."""
    tokens, top_k, num_experts, kind = COUNTED
    ep_size = state.topology.ep_size
    experts = shard_experts(qwen_experts(num_experts), state.ep_mesh, num_experts)
    route = make_dispatcher(name, state.ep_mesh.get_group(), num_experts, state.ep_nodes)
    inputs = all_inputs(ep_size, tokens, top_k, num_experts, kind)
    hidden, index, weights, gradient = inputs[state.ep_mesh.get_local_rank()]
    hidden.requires_grad_()
    run = lambda x: route(x.sin(), index, weights, experts)  # noqa: E731
    counter = Counter(state.topology.ranks_per_node)
    with replaced(dist, "all_to_all_single", counter):
        if checkpointed:
            out = checkpoint(run, hidden, use_reentrant=False, context_fn=tape_contexts)
        else:
            out = run(hidden)
        out.backward(gradient)
    return counter, out.detach(), hidden.grad


def bytes_of(state):
    """``{dispatcher: (bytes that left the node, as counted by benchmarks/dispatch_bytes.py)}`` of this rank."""
    tokens, top_k, num_experts, kind = COUNTED
    sizes, rank = state.topology, state.ep_mesh.get_local_rank()
    index = all_inputs(sizes.ep_size, tokens, top_k, num_experts, kind)[rank][1]
    rows = rows_away(index, num_experts, sizes.ep_size, state.ep_nodes.ranks_per_node, rank)
    paper = step_bytes(rows, PackedLayout(HIDDEN, top_k, torch.float32))
    names = {"eager": "eager", "fused": "two stages", "domino": "one stage"}
    real = {names[name]: one_layer(state, name)[0].bytes_away for name in names}
    return {name: (_over_ranks(real[name]), _over_ranks(paper[name])) for name in real}


def _over_ranks(count):
    total = torch.tensor(count)
    dist.all_reduce(total)  # a row's way back leaves another rank than its way out: only sums are equal
    return int(total)


def recompute(state):
    """Exchanges without and with checkpointing, and whether their results are equal."""
    plain, *want = one_layer(state, "fused")
    again, *got = one_layer(state, "fused", checkpointed=True)
    return plain.calls, again.calls, all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def bf16_distances(state):
    """Squared distance to float32 and squared length of output and gradients: eager's and ours, over all ranks."""
    tokens, top_k, num_experts, kind = ([24, 16], 8, 32, "random")
    inputs = all_inputs(state.topology.ep_size, tokens, top_k, num_experts, kind)[state.ep_mesh.get_local_rank()]
    hidden, index, weights, gradient = inputs
    found = {}
    for name, dtype in (("truth", torch.float32), ("eager", torch.bfloat16), ("fused", torch.bfloat16)):
        module = qwen_experts(num_experts).to(torch.bfloat16).to(dtype)
        experts = shard_experts(module, state.ep_mesh, num_experts)
        route = make_dispatcher(name.replace("truth", "eager"), state.ep_mesh.get_group(), num_experts, state.ep_nodes)
        rows, routing = hidden.bfloat16().to(dtype).requires_grad_(), weights.clone().requires_grad_()
        out = route(rows, index, routing, experts)
        out.backward(gradient.bfloat16().to(dtype))
        down = module.down_proj.grad.to_local()
        found[name] = {"output": out, "hidden": rows.grad, "weights": routing.grad, "down": down}
    sums = {}
    for name in ("eager", "fused"):
        for what, value in found[name].items():
            truth = found["truth"][what].detach().double()
            off = torch.stack([(value.detach().double() - truth).square().sum(), truth.square().sum()])
            dist.all_reduce(off)
            sums[name, what] = math.sqrt(off[0] / off[1])
    return sums


# -- faults -----------------------------------------------------------------------------------------------------


class Faulty:
    """The operators of CPU with one of them wrong."""

    def __init__(self, **wrong):
        self.wrong = wrong

    def __getattr__(self, name):
        return self.wrong.get(name, getattr(plain_ops, name))


def row_per_rank(nodes):
    """Dedup per rank instead of per node: exact, but as many bytes as in one stage."""

    def count_routing(index, num_experts, parts):
        if parts != nodes.num_nodes:
            return plain_ops.count_routing(index, num_experts, parts)
        by_rank = plain_ops.count_routing(index, num_experts, nodes.num_nodes * nodes.ranks_per_node)
        pairs, rows = by_rank.totals_X[:num_experts], by_rank.totals_X[num_experts:]
        totals = torch.cat([pairs, rows.view(nodes.num_nodes, -1).sum(1).int()])
        return Routing(by_rank.index_TK, by_rank.rank_TK, by_rank.pair_row_TK, by_rank.row_position_TK, totals)

    return Faulty(count_routing=count_routing)


def wrong_place(nodes):
    """Rows go on to the next rank of the node."""

    def count_routing(index, num_experts, parts):
        if num_experts == parts == nodes.ranks_per_node + 1:
            index = torch.where(index < nodes.ranks_per_node, (index + 1) % nodes.ranks_per_node, index)
        return plain_ops.count_routing(index, num_experts, parts)

    return Faulty(count_routing=count_routing)


def no_partial_sum(rows, plan):
    """What comes home from a node is the row of one rank, not the sum over its ranks."""
    if isinstance(plan, node_plan.RelayStage):
        return rows.index_select(0, plan.routing.row_position_TK.amax(1))
    return _sum_rows(rows, plan)


_sum_rows = fused.sum_rows


def faults(state):
    nodes = state.ep_nodes
    found = {"none": parity(state, EVEN)}
    with replaced(fused, "get_ops", lambda device_type: wrong_place(nodes)):
        found["wrong place"] = parity(state, EVEN)
    with replaced(fused, "sum_rows", no_partial_sum):
        found["no partial sum"] = parity(state, EVEN)
    with replaced(fused, "get_ops", lambda device_type: row_per_rank(nodes)):
        found["a row a rank"] = parity(state, COUNTED)
        real, paper = bytes_of(state)["two stages"]
    return found, real / paper


# -- the one spawn ------------------------------------------------------------------------------------------------


def everything():
    init_gloo()
    found = {"corners": {}, "bytes": {}, "nodes": {}}
    for layout, sizes in LAYOUTS.items():
        state = FSDPTurboParallelState(Topology.resolve(RANKS, **sizes), "cpu", None)
        found["nodes"][layout] = (state.ep_nodes.num_nodes, state.ep_nodes.ranks_per_node)
        found["corners"][layout] = corners_of(layout, state)
        if layout in COUNTED_IN:
            found["bytes"][layout] = bytes_of(state)
        if layout == "4 x 4":
            found["faults"], found["recompute"], found["bf16"] = faults(state), recompute(state), bf16_distances(state)
            automatic = make_dispatcher("auto", state.ep_mesh.get_group(), 32, state.ep_nodes)
            found["candidates"] = list(automatic.candidates)
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(everything, RANKS, timeout=170)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(ranks, layout: str):
    for found in ranks:
        assert f"{found['nodes'][layout][0]} x {found['nodes'][layout][1]}" == layout.removesuffix(", cp 2")
        assert max(found["corners"][layout].values()) < TOLERANCE, found["corners"][layout]


@pytest.mark.parametrize("layout", COUNTED_IN)
def test_bytes_between_nodes_are_those_on_paper(ranks, layout: str):
    """Forward and backward, rows out and back, tails included; and two stages send fewer than one."""
    found = ranks[0]["bytes"][layout]
    print(found)
    for real, paper in found.values():
        assert real == paper > 0
    assert found["two stages"][0] < found["one stage"][0]


def test_faults_are_seen(ranks):
    """On the rank that is worst off; a row a rank is exact, and sends more bytes than are on paper."""
    worst = {name: max(found["faults"][0][name] for found in ranks) for name in ranks[0]["faults"][0]}
    assert worst["none"] < TOLERANCE
    assert worst["a row a rank"] < TOLERANCE
    assert min(worst["wrong place"], worst["no partial sum"]) > 100 * TOLERANCE
    assert ranks[0]["faults"][1] > 1.1


def test_one_gather_of_counts_and_none_in_recompute(ranks):
    """Rows cross twice each way; recompute sends them out again, and back unless autograd stops early."""
    for found in ranks:
        plain, again, equal = found["recompute"]
        assert plain == {"counts": 1, "rows": 8}
        assert again["counts"] == 1
        assert 8 < again["rows"] <= 12
        assert equal


def test_bf16_is_no_further_from_float32_than_eager(ranks):
    """A node's partial sum is rounded once more than in one stage."""
    found = ranks[0]["bf16"]
    print(found)
    for what in ("output", "hidden", "weights", "down"):
        assert 1e-4 < found["fused", what] < 1.5 * found["eager", what]


def test_auto_times_two_stages_and_one(ranks):
    assert ranks[0]["candidates"] == ["fused", "domino", "eager", ONE_STAGE]
