"""The Triton operators on the GPU itself, in bf16 and float32, against a loop over experts in float64."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(
        "no CUDA device: the same kernels run under Triton's interpreter in tests/unit/test_ops.py",
        allow_module_level=True,
    )

from hf_fsdpturbo.ops.expert_mlp import SlotMap, expert_mlp
from hf_fsdpturbo.ops.table import get_ops

DEVICE = "cuda"


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def reference(x, weights, gate_up, down, index):
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        token, k = (index == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ down[expert].T
        out = out.index_add(0, token, y * weights[token, k, None])
    return out


def draw(tokens, top_k, experts, hidden, ffn, dtype, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=DEVICE)

    scores = normal(tokens, experts) + torch.linspace(0, 2, experts, device=DEVICE)
    if experts > top_k + 2:
        scores[:, 1] = scores[:, -2] = -1e9  # experts without tokens
    index = scores.topk(top_k, dim=-1).indices
    weights = torch.rand(tokens, top_k, generator=generator, device=DEVICE)
    values = (
        normal(tokens, hidden),
        weights,
        normal(experts, 2 * ffn, hidden) * 0.1,
        normal(experts, hidden, ffn) * 0.1,
    )
    return index, [value.to(dtype) for value in values], normal(tokens, hidden).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "top_k", "experts", "hidden", "ffn"), [
    (1000, 8, 32, 256, 96), (517, 2, 8, 2048, 768), (64, 4, 4, 128, 64), (300, 20, 64, 128, 64), (3, 1, 16, 64, 32),
])  # fmt: skip
def test_block(dtype, tokens, top_k, experts, hidden, ffn):
    ops = get_ops(DEVICE)
    index, values, gradient = draw(tokens, top_k, experts, hidden, ffn, dtype, seed=tokens)
    routing = ops.count_routing(index, experts, 1)
    slots, ends = ops.slot_pairs(routing, routing.totals_X.unsqueeze(0), 0)
    ours = [value.clone().requires_grad_() for value in values]
    exact = [value.double().requires_grad_() for value in values]
    poison = torch.full((64 << 20,), float("nan"), device=DEVICE)  # freed memory holds NaN: unwritten output shows
    del poison
    out = expert_mlp(*ours, SlotMap(slots, ends, index.numel()), ops)
    out.backward(gradient)
    want = reference(*exact, index)
    want.backward(gradient.double())
    tolerance = 1e-2 if dtype == torch.bfloat16 else 3e-3  # float32 products may run in tf32
    for got, wanted in [(out, want), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]:
        assert got.isfinite().all()
        assert relative(got, wanted) < tolerance


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_counting_equals_plain_torch(ep_size):
    """Ranks within experts may be numbered otherwise; everything that is counted must be the same."""
    ours, plain = get_ops(DEVICE), get_ops("cpu")
    for tokens, top_k, experts in ((1, 1, 8), (1003, 8, 64), (257, 6, 16), (0, 2, 8)):
        index = torch.rand(tokens, experts, device=DEVICE).topk(top_k, dim=-1).indices
        a, b = ours.count_routing(index, experts, ep_size), plain.count_routing(index.cpu(), experts, ep_size)
        assert a.totals_X[:experts].tolist() == b.totals_X[:experts].tolist()
        if ep_size > 1:
            assert a.totals_X.tolist() == b.totals_X.tolist()
            assert torch.equal(a.pair_row_TK.cpu(), b.pair_row_TK)
            assert torch.equal(a.row_position_TK.cpu(), b.row_position_TK)
        slots, ends = ours.slot_pairs(a, a.totals_X.unsqueeze(0).expand(ep_size, -1).contiguous(), 0)
        totals = b.totals_X.unsqueeze(0).expand(ep_size, -1).contiguous()
        assert ends.tolist() == plain.slot_pairs(b, totals, 0)[1].tolist()
        assert (
            len(
                {
                    (e // (experts // ep_size), s)
                    for e, s in zip(index.flatten().tolist(), slots.flatten().tolist(), strict=True)
                }
            )
            == tokens * top_k
        )  # noqa: E501


def test_the_same_twice():
    """No atomics, no race: two runs agree bit by bit."""
    ops = get_ops(DEVICE)
    index, values, gradient = draw(4096, 8, 64, 512, 256, torch.bfloat16, seed=0)
    results = []
    for _ in range(2):
        routing = ops.count_routing(index, 64, 1)
        slots, ends = ops.slot_pairs(routing, routing.totals_X.unsqueeze(0), 0)
        leaves = [value.clone().requires_grad_() for value in values]
        out = expert_mlp(*leaves, SlotMap(slots, ends, index.numel()), ops)
        out.backward(gradient)
        results.append([out, *(leaf.grad for leaf in leaves)])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(1, 1, 8), (16384, 8, 128), (257, 6, 60), (4096, 8, 512), (0, 2, 8)]
)
def test_own_slots_are_those_of_counting_and_placing(tokens, top_k, experts):
    ops = get_ops(DEVICE)
    index = torch.rand(tokens, experts, device=DEVICE).topk(top_k, dim=-1).indices
    routing = ops.count_routing(index, experts, 1)
    expected = ops.slot_pairs(routing, routing.totals_X.unsqueeze(0), 0)
    for got, wanted in zip(ops.own_slots(index, experts), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 4), (512, 10)])
def test_aux_loss_is_the_familys(experts, top_k, autocast, masked):
    """bf16 logits have equals at the edge of the top-k: ours must choose those that torch's top-k chooses on CUDA."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func as theirs

    from hf_fsdpturbo.kernels.aux_loss import one_pass

    logits = [torch.randn(2048, experts, device=DEVICE).bfloat16() for _ in range(3)]
    mask = (torch.rand(2, 1024, device=DEVICE) < 0.7).long() if masked else None
    found = []
    for function in (one_pass(theirs, DEVICE), theirs):
        leaves = [each.clone().requires_grad_() for each in logits]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = function(tuple(leaves), experts, top_k, mask)
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    # One other choice of a token changes it by more than 1e-6; bf16 probabilities may be rounded the other way.
    assert relative(found[0][0], found[1][0]) < (1e-6 if autocast else 1e-3)
    wide = [each.double().requires_grad_() for each in logits]
    exact = torch.autograd.grad(theirs(tuple(wide), experts, top_k, mask), wide)
    for got, wanted, truth in zip(found[0][1:], found[1][1:], exact, strict=True):
        assert got.dtype == torch.bfloat16
        # What is left of a gradient is a small difference: of bf16 probabilities either is 2 to 7 % off.
        assert relative(got, truth) < max(2**-8, 1.02 * relative(wanted, truth))
