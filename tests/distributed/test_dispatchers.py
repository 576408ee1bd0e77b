"""Every dispatcher against one process with all experts: output and every gradient, over all routing corners."""

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_fsdpturbo.dispatch import mc2
from hf_fsdpturbo.dispatch.dispatcher import get_dispatcher
from tests.support import npu_stand_in
from tests.support.spawn import init_gloo, run_ranks

HIDDEN, FFN = 16, 8
TOLERANCE = 1e-6

# name -> (tokens of each rank, K, E, kind of routing); ranks beyond the list repeat it
CORNERS = {
    "random": ([13, 8], 2, 8, "random"),
    "no tokens on rank 1": ([11, 0], 2, 8, "random"),
    "no tokens anywhere": ([0, 0], 2, 8, "random"),
    "one token": ([1, 0], 2, 8, "random"),
    "all tokens to one expert": ([9, 6], 1, 8, "first"),
    "a rank without tokens": ([9, 6], 2, 8, "first"),
    "last expert only": ([7, 5], 1, 8, "last"),
    "a slice without tokens for one rank": ([10, 10], 2, 8, "halves"),
    "one expert a rank": ([9, 4], 1, 0, "random"),
    "K == E": ([5, 7], 8, 8, "random"),
}


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()


def routing(kind, tokens, top_k, num_experts, generator, own=slice(0)):
    """``[tokens, top_k]``; ``own`` are the experts of the rank whose tokens these are."""
    scores = torch.rand(tokens, num_experts, generator=generator)
    if kind == "first":
        scores[:, :top_k] += 2
    elif kind == "last":
        scores[:, -top_k:] += 2
    elif kind == "halves":  # first half of the tokens to low experts, second half to high ones
        low = torch.arange(tokens) < (tokens + 1) // 2
        scores[low, : num_experts // 2] += 2
        scores[~low, num_experts // 2 :] += 2
    elif kind == "own":
        scores[:, own] += 2
    elif kind == "first node":  # of four
        scores[:, : num_experts // 4] += 2
    return scores.topk(top_k, dim=-1).indices


def qwen_experts(num_experts):
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=FFN, num_experts=num_experts, hidden_act="silu")
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def gpt_oss_experts(num_experts):
    """Biases, a transposed interleaved layout and another activation: not a plain SwiGLU."""
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=num_experts)
    config._experts_implementation = "eager"
    module = GptOssExperts(config)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


MODULES = {"qwen": qwen_experts, "gpt_oss": gpt_oss_experts}


def make_dispatcher(name, group, num_experts, nodes=None):
    if name == "mc2":
        npu_stand_in.install()
        dispatcher = mc2.Mc2Dispatcher(group, num_experts)
        dispatcher._device_type = "npu"
        return dispatcher
    return get_dispatcher(name)(group, num_experts, nodes)


def all_inputs(world, tokens, top_k, num_experts, kind):
    generator = torch.Generator().manual_seed(7)
    inputs, local = [], num_experts // world
    for rank in range(world):
        count = tokens[rank % len(tokens)]
        hidden = torch.randn(count, HIDDEN, generator=generator)
        own = slice(rank * local, (rank + 1) * local)
        index = routing(kind, count, top_k, num_experts, generator, own)
        weights = torch.rand(count, top_k, generator=generator)
        inputs.append((hidden, index, weights, torch.randn(count, HIDDEN, generator=generator)))
    return inputs


def one_process(module, inputs, frozen):
    hidden, index, weights, gradient = (torch.cat(parts) for parts in zip(*inputs, strict=True))
    hidden, weights = hidden.requires_grad_(), weights.requires_grad_()
    for parameter in module.parameters():
        parameter.requires_grad_(not frozen)
    out = module(hidden, index, weights)
    if hidden.shape[0]:
        out.backward(gradient)
    return out.detach(), hidden.grad, weights.grad, {n: p.grad for n, p in module.named_parameters()}


@contextlib.contextmanager
def mc2_everywhere():
    """The stand-in computes in float32 with K 1 to 8 on CPU; limits are tested in tests/unit/test_mc2.py."""
    before = mc2.check_mc2
    mc2.check_mc2 = lambda *args: None
    try:
        yield
    finally:
        mc2.check_mc2 = before


def compare(name, corner, module_name="qwen", frozen=False, mesh=None, nodes=None):
    """Worst relative distance over output and gradients of this rank.

    ``corner`` is a name of :data:`CORNERS` or a row like theirs; ``mesh`` the ep axis, the world when left out.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from hf_fsdpturbo.sharding.expert_parallel import shard_experts

    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    rank, world = mesh.get_local_rank(), mesh.size()
    tokens, top_k, num_experts, kind = CORNERS[corner] if isinstance(corner, str) else corner
    num_experts = num_experts or world
    inputs = all_inputs(world, tokens, top_k, num_experts, kind)
    want_out, want_hidden, want_weights, want = one_process(MODULES[module_name](num_experts), inputs, frozen)
    starts = [0]
    for hidden, *_ in inputs:
        starts.append(starts[-1] + hidden.shape[0])
    mine = slice(starts[rank], starts[rank + 1])

    module = MODULES[module_name](num_experts)
    for parameter in module.parameters():
        parameter.requires_grad_(not frozen)
    experts = shard_experts(module, mesh, num_experts)
    dispatcher = make_dispatcher(name, mesh.get_group(), num_experts, nodes)
    hidden, index, weights, gradient = inputs[rank]
    hidden, weights = hidden.requires_grad_(), weights.requires_grad_()
    out = dispatcher(hidden, index, weights, experts)
    out.backward(gradient)
    pairs = [(out.detach(), want_out[mine])]
    if starts[-1]:
        pairs += [(hidden.grad, want_hidden[mine]), (weights.grad, want_weights[mine])]
    local = num_experts // world
    for parameter_name, parameter in module.named_parameters():
        if frozen:
            assert parameter.grad is None
            assert not parameter.requires_grad
            continue
        assert parameter.grad is not None, f"{parameter_name} got no gradient"  # zeros, never None
        got = parameter.grad.to_local()
        reference = want[parameter_name]
        whole = torch.zeros(num_experts, *got.shape[1:]) if reference is None else reference
        pairs.append((got, whole[rank * local : (rank + 1) * local]))
    return max(relative(a, b) if b.norm() > 0 else a.norm().item() for a, b in pairs)


def _npu_corners(name):
    """The Ascend operators over their stand-in, under the dispatchers that use them: exact again."""
    from hf_fsdpturbo.dispatch import fused
    from hf_fsdpturbo.ops import npu

    init_gloo()
    npu_stand_in.install()
    fused.get_ops = lambda device_type: npu
    return {corner: compare(name, corner) for corner in CORNERS}


@pytest.mark.parametrize("world", [2, 4])
def test_corners_with_ascend_operators(world):
    """With ep >= K a token's rows are packed into a buffer with as many rows as routing has entries, some unused."""
    for results in run_ranks(_npu_corners, world, "fused", timeout=90):
        assert max(results.values()) < TOLERANCE, results


def _all_corners(name, module_name, frozen):
    init_gloo()
    return {corner: compare(name, corner, module_name, frozen) for corner in CORNERS}


@pytest.mark.parametrize("name", ["eager", "fused", "domino"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_corners(name, world):
    for results in run_ranks(_all_corners, world, name, "qwen", False, timeout=90):
        assert max(results.values()) < TOLERANCE, results


@pytest.mark.parametrize("name", ["fused", "domino"])
def test_frozen_experts(name):
    for results in run_ranks(_all_corners, 2, name, "qwen", True, timeout=90):
        assert max(results.values()) < TOLERANCE, results


@pytest.mark.parametrize("name", ["eager", "fused", "domino"])
def test_other_experts_run_their_own_forward(name):
    for results in run_ranks(_all_corners, 2, name, "gpt_oss", False, timeout=90):
        assert max(results.values()) < TOLERANCE, results


def _mc2_corners():
    init_gloo()
    with mc2_everywhere():
        return {corner: compare("mc2", corner) for corner in CORNERS}


def test_mc2_over_its_stand_in():
    """The operators' order of rows and counts, at their smallest group: eight ranks. Not the hardware."""
    for results in run_ranks(_mc2_corners, 8, timeout=120):
        assert max(results.values()) < TOLERANCE, results


def _counts_of_exchanges(dispatcher, checkpointed):
    """(exchanges of counts, exchanges of rows) in forward and backward of one layer on this rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.checkpoint import checkpoint

    from hf_fsdpturbo.dispatch.recompute import tape_contexts
    from hf_fsdpturbo.sharding.expert_parallel import shard_experts

    init_gloo()
    seen, received = [], set()
    exchange = dist.all_to_all_single

    def counting(output, rows, *args, **kwargs):
        seen.append("counts" if not rows.is_floating_point() else "rows")
        if rows.is_floating_point():
            received.add((output.shape[0], output.shape[1] * output.element_size()))
        return exchange(output, rows, *args, **kwargs)

    dist.all_to_all_single = counting
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    experts = shard_experts(qwen_experts(8), mesh, 8)
    route = make_dispatcher(dispatcher, mesh.get_group(), 8)
    hidden, index, weights, gradient = all_inputs(2, [12, 9], 2, 8, "random")[dist.get_rank()]
    hidden.requires_grad_()
    run = lambda x: route(x.sin(), index, weights, experts)  # noqa: E731
    out = checkpoint(run, hidden, use_reentrant=False, context_fn=tape_contexts) if checkpointed else run(hidden)
    if checkpointed and dispatcher != "eager":
        # Packed rows (wider than any other) must not outlive the forward through whatever holds a view of them.
        packed = {rows * width for rows, width in received if width > HIDDEN * 4}
        alive = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        assert not [t.shape for t in alive if t.untyped_storage().nbytes() in packed]
    out.backward(gradient)
    return seen.count("counts"), seen.count("rows")


@pytest.mark.parametrize(("dispatcher", "rows"), [("eager", 4), ("fused", 4), ("domino", 8)])
def test_recompute_counts_nothing_again(dispatcher, rows):
    """Forward: counts once, rows out and back. Backward: two exchanges a slice. Recompute: rows out again, and back
    unless autograd stops early; never the counts."""
    assert run_ranks(_counts_of_exchanges, 2, dispatcher, False) == [(1, rows)] * 2
    for counts, exchanged in run_ranks(_counts_of_exchanges, 2, dispatcher, True):
        assert counts == 1
        assert exchanged <= rows + rows // 2
