"""Operators against a loop over experts in float64, forward and gradient, in plain PyTorch and in Triton's
interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from hf_fsdpturbo import compat
from hf_fsdpturbo.dispatch.node_plan import RelayStage
from hf_fsdpturbo.dispatch.over_nodes import relay_rows
from hf_fsdpturbo.dispatch.packed_rows import PackedLayout
from hf_fsdpturbo.ops.adamw import AdamWNumbers, AdamWTensors
from hf_fsdpturbo.ops.expert_mlp import SlotMap, expert_mlp
from hf_fsdpturbo.ops.functional import permute, swiglu, unpermute
from hf_fsdpturbo.ops.table import OPS, get_ops
from tests.support import npu_stand_in

needs_grouped_mm = pytest.mark.skipif(
    not compat.has_cpu_grouped_mm(), reason=f"torch {torch.__version__} has no grouped_mm on CPU (2.9 has)"
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INNER = [os.path.join(os.path.dirname(__file__), f"test_{name}.py") for name in ("linear_cross_entropy", "aux_loss")]
# "cuda" is the Triton file, on CPU tensors; "npu" runs over a stand-in for torch_npu.
BACKENDS = ["cpu", "npu"] if not INTERPRETED else ["cuda"]


@pytest.fixture(params=BACKENDS)
def ops(request, monkeypatch):
    if request.param == "npu":
        npu_stand_in.install(monkeypatch)
    return get_ops(request.param)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def draw_index(tokens, top_k, num_experts, seed, kind="random"):
    generator = torch.Generator().manual_seed(seed)
    if kind == "one":  # every token to the same experts
        return torch.arange(top_k).expand(tokens, top_k).contiguous()
    scores = torch.rand(tokens, num_experts, generator=generator) + torch.linspace(0, 0.6, num_experts)
    return scores.topk(top_k, dim=-1).indices


CASES = [  # tokens, K, E, P, kind
    (0, 2, 4, 2, "random"),
    (1, 1, 4, 4, "random"),
    (37, 2, 8, 2, "random"),
    (50, 3, 6, 1, "random"),
    (40, 4, 4, 2, "random"),  # K == E
    (33, 2, 8, 4, "one"),
    (70, 8, 16, 8, "random"),
    (19, 20, 24, 4, "random"),  # K above the unroll limit
]


@pytest.mark.parametrize(("tokens", "top_k", "num_experts", "ep_size", "kind"), CASES)
def test_counting(ops, tokens, top_k, num_experts, ep_size, kind):
    """Rows and slots of all ranks together: each row once, slots a permutation sorted by expert, each pair at its
    owner."""
    num_local = num_experts // ep_size
    indices = [draw_index(tokens + (3 * r if tokens else 0), top_k, num_experts, r, kind) for r in range(ep_size)]
    routings = [ops.count_routing(index, num_experts, ep_size) for index in indices]
    table = torch.stack([r.totals_X for r in routings])
    seen = [dict() for _ in range(ep_size)]
    ends = {}
    for rank, (index, routing) in enumerate(zip(indices, routings, strict=True)):
        pairs = torch.bincount(index.flatten(), minlength=num_experts)
        assert table[rank, :num_experts].tolist() == pairs.tolist()
        slots, offsets = ops.slot_pairs(routing, table, rank)
        assert slots.dtype == offsets.dtype == torch.int32
        ends[rank] = offsets.tolist()
        for expert, slot in zip(index.flatten().tolist(), slots.flatten().tolist(), strict=True):
            owner = expert // num_local
            assert slot not in seen[owner]
            seen[owner][slot] = expert % num_local
        if ep_size > 1:
            rows = sorted({(e // num_local, t) for t, es in enumerate(index.tolist()) for e in es})
            number = {row: i for i, row in enumerate(rows)}
            expected = [[number[e // num_local, t] for e in es] for t, es in enumerate(index.tolist())]
            assert routing.pair_row_TK.tolist() == expected
            position = routing.row_position_TK
            assert sorted(position[position >= 0].tolist()) == list(range(len(rows)))
            assert ((position == -1) | (position == routing.pair_row_TK)).all()
            per_rank = [sum(owner == p for owner, _ in rows) for p in range(ep_size)]
            assert table[rank, num_experts:].tolist() == per_rank
    for owner in range(ep_size):
        experts = [seen[owner][slot] for slot in sorted(seen[owner])]
        assert sorted(seen[owner]) == list(range(len(experts)))
        assert experts == sorted(experts)
        assert (
            ends[owner]
            == torch.bincount(torch.tensor(experts, dtype=torch.long), minlength=num_local).cumsum(0).tolist()
        )


@pytest.mark.parametrize(("tokens", "top_k", "num_experts", "ep_size", "kind"), [*CASES, (300, 8, 128, 1, "random")])
def test_own_slots(ops, tokens, top_k, num_experts, ep_size, kind):
    """Where one rank has all experts: the slots that counting and placing for a group of one give."""
    index = draw_index(tokens, top_k, num_experts, 7, kind)
    routing = ops.count_routing(index, num_experts, 1)
    expected = ops.slot_pairs(routing, routing.totals_X.unsqueeze(0), 0)
    slots, ends = ops.own_slots(index.t().contiguous().t(), num_experts)
    assert slots.dtype == ends.dtype == torch.int32
    assert torch.equal(slots, expected[0])
    assert torch.equal(ends, expected[1])
    assert sorted(slots.flatten().tolist()) == list(range(tokens * top_k))


@pytest.mark.parametrize(("tokens", "top_k", "num_experts", "ep_size", "kind"), [c for c in CASES if c[3] > 1])
def test_write_pairs(ops, tokens, top_k, num_experts, ep_size, kind):
    index = draw_index(tokens, top_k, num_experts, 5, kind)
    routing = ops.count_routing(index, num_experts, ep_size)
    slots, _ = ops.slot_pairs(routing, routing.totals_X.unsqueeze(0).expand(ep_size, -1).contiguous(), 0)
    weights = torch.rand(tokens, top_k)
    rows = int(routing.totals_X[num_experts:].sum())
    buffer = torch.full((rows, 2 * top_k + 3), -7, dtype=torch.int32)
    out_slots, out_weights = buffer[:, 1 : top_k + 1], buffer.view(torch.float32)[:, top_k + 2 : 2 * top_k + 2]
    ops.write_pairs(routing, slots, weights, out_slots, out_weights)
    for t in range(tokens):
        for k in range(top_k):
            row = routing.pair_row_TK[t, k]
            assert out_slots[row, k] == slots[t, k]
            assert out_weights[row, k] == weights[t, k]
    assert (out_slots >= 0).sum() == tokens * top_k
    assert (buffer[:, 0] == -7).all()
    assert (buffer[:, -1] == -7).all()


@pytest.mark.parametrize("rows", [0, 1, 29])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_relay(ops, rows, top_k):
    """Rows that reached a node of four ranks go on to those with any of their pairs; the gradient comes back."""
    near, hidden = 4, 16
    generator = torch.Generator().manual_seed(rows * 10 + top_k)
    place = torch.randint(-1, near - 1, (rows, top_k), generator=generator)  # -1: elsewhere; the last gets none
    place[:, -1:] = place[:, -1:].clamp_min(0)  # a row came for some pair
    slots_n = torch.bincount(place[place >= 0], minlength=near)
    local = torch.full((rows, top_k), -1)
    for p in range(near):
        local[place == p] = torch.randperm(int(slots_n[p]), generator=generator)
    starts = slots_n.cumsum(0) - slots_n
    layout = PackedLayout(hidden, top_k, torch.float32)
    packed = torch.zeros(rows, layout.width)
    layout.rows(packed).copy_(torch.randn(rows, hidden, generator=generator))
    layout.slots(packed).copy_(torch.where(place < 0, -1, local + starts[place.clamp_min(0)]))
    layout.weights(packed).copy_(torch.rand(rows, top_k, generator=generator))

    stage = RelayStage(ops, near)
    stage.number(torch.empty(0), slots_n.int())
    stage.send_splits = [int((place == p).any(1).sum()) for p in range(near)]
    out = relay_rows(packed.requires_grad_(), stage, layout)
    want = [(r, p) for p in range(near) for r in range(rows) if (place[r] == p).any()]
    assert out.shape == (len(want), layout.width)
    gradient = torch.zeros_like(out)
    layout.rows(gradient).copy_(torch.randn(len(want), hidden, generator=generator))
    layout.weights(gradient).copy_(torch.rand(len(want), top_k, generator=generator))
    (back,) = torch.autograd.grad(out, packed, gradient)
    tokens, weights = torch.zeros(rows, hidden), torch.zeros(rows, top_k)
    for row, (r, p) in enumerate(want):
        mine = place[r] == p
        assert torch.equal(layout.rows(out)[row], layout.rows(packed)[r])
        assert layout.slots(out.detach())[row].tolist() == torch.where(mine, local[r], -1).tolist()
        assert layout.weights(out.detach())[row][mine].tolist() == layout.weights(packed.detach())[r][mine].tolist()
        tokens[r] += layout.rows(gradient)[row]
        weights[r] += torch.where(mine, layout.weights(gradient)[row], 0)
    torch.testing.assert_close(layout.rows(back), tokens)
    torch.testing.assert_close(layout.weights(back), weights)


def make_map(ops, rows, top_k, num_experts, seed=0, hole=True):
    """A slot map as a rank receives it: some pairs of a row belong to other ranks."""
    index = draw_index(rows, top_k, num_experts, seed)
    routing = ops.count_routing(index, num_experts, 1)
    slots, offsets = ops.slot_pairs(routing, routing.totals_X.unsqueeze(0), 0)
    if not hole or not rows:
        return index, SlotMap(slots, offsets, rows * top_k)
    keep = torch.rand(rows, top_k, generator=torch.Generator().manual_seed(seed + 1)) < 0.6
    keep[:, 0] |= ~keep.any(1)
    keep[index == num_experts - 2] = False  # an expert without tokens
    kept = slots.masked_fill(~keep, -1)
    order = torch.full((rows * top_k,), -1, dtype=torch.int32)
    order[kept[keep].sort().values.long()] = torch.arange(int(keep.sum()), dtype=torch.int32)
    dense = torch.where(keep, order[kept.clamp_min(0).long()], -1).int()
    ends = torch.bincount(index[keep], minlength=num_experts).cumsum(0).int()
    return index, SlotMap(dense, ends, int(keep.sum()))


def reference(rows, weights, gate_up, down, index, slot_map):
    out = torch.zeros_like(rows)
    for expert in range(gate_up.shape[0]):
        r, k = ((index == expert) & (slot_map.slots_RK >= 0)).nonzero(as_tuple=True)
        gate, up = (rows[r] @ gate_up[expert].T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ down[expert].T
        out = out.index_add(0, r, y * weights[r, k, None])
    return out


def run_block(
    ops, rows, top_k, num_experts, dtype, hidden=16, ffn=24, strided=False, need=(True, True, True, True), hole=True
):
    torch.manual_seed(3)
    index, slot_map = make_map(ops, rows, top_k, num_experts, hole=hole)
    values = [torch.randn(rows, hidden), torch.rand(rows, top_k), torch.randn(num_experts, 2 * ffn, hidden) * 0.3]
    values = [v.to(dtype) for v in (*values, torch.randn(num_experts, hidden, ffn) * 0.3)]
    ours = [v.clone().requires_grad_(n) for v, n in zip(values, need, strict=True)]
    exact = [v.double().requires_grad_(n) for v, n in zip(values, need, strict=True)]
    first = ours[0]
    if strided:
        wide = torch.nn.functional.pad(first, (0, 16))
        first = wide[:, :hidden]
    gradient = torch.randn(rows, hidden).to(dtype)
    out = expert_mlp(first, ours[1], ours[2], ours[3], slot_map, ops)
    want = reference(*exact, index, slot_map)
    out.backward(gradient)
    if any(need):
        want.backward(gradient.double())
    return [(out, want)] + [(a.grad, b.grad) for a, b in zip(ours, exact, strict=True)]


@needs_grouped_mm
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize(("rows", "top_k", "num_experts"), [(41, 2, 5), (30, 4, 4), (3, 17, 18)])
def test_expert_mlp(ops, rows, top_k, num_experts, dtype, tolerance, strided):
    for got, want in run_block(ops, rows, top_k, num_experts, dtype, strided=strided):
        assert got.dtype == dtype
        assert relative(got, want) < tolerance


@needs_grouped_mm
def test_expert_mlp_wide(ops):
    """More columns than one tile of the SwiGLU kernels, and a hidden size that fills no power of two."""
    for got, want in run_block(ops, 12, 2, 4, torch.float32, hidden=40, ffn=300):
        assert relative(got, want) < 2e-6


@needs_grouped_mm
def test_expert_mlp_full_map(ops):
    """Every pair of every row is here: a group of one."""
    for got, want in run_block(ops, 23, 3, 6, torch.float32, hole=False):
        assert relative(got, want) < 2e-6


@needs_grouped_mm
def test_expert_mlp_without_rows(ops):
    """No rows at all: the experts' gradients are zeros, not None."""
    (out, _), *grads = run_block(ops, 0, 2, 4, torch.float32)
    assert out.shape == (0, 16)
    for got, want in grads[2:]:
        assert got.shape == want.shape
        assert got.abs().max() == 0


@needs_grouped_mm
@pytest.mark.parametrize("need", [(True, True, False, False), (False, False, True, True), (False, True, False, True)])
def test_frozen_parts(ops, need):
    results = run_block(ops, 20, 2, 4, torch.float32, need=need)
    for wanted, (got, want) in zip((True, *need), results, strict=True):
        assert (got is not None) == wanted
        if wanted:
            assert relative(got, want) < 2e-6


def loop_matmul(rows, weights, ends):
    """``rows[group g] @ weights[g].T``, one group after another."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ weight.T for part, weight in zip(rows.split(sizes), weights, strict=True)])


@needs_grouped_mm
def test_parts_with_gradients_make_the_block(ops):
    """permute, matmuls, SwiGLU x weight and unpermute, one by one, equal the block and its gradients."""
    torch.manual_seed(0)
    _, slot_map = make_map(ops, 25, 3, 6)
    values = [torch.randn(25, 16), torch.rand(25, 3), torch.randn(6, 48, 16) * 0.3, torch.randn(6, 16, 24) * 0.3]

    def inside(x, w, gate_up, down):
        rows, weights = permute(x, slot_map, ops, w)
        active = swiglu(loop_matmul(rows, gate_up, slot_map.offsets_L), ops, weights)
        return unpermute(loop_matmul(active, down, slot_map.offsets_L), slot_map, ops)

    def outside(x, w, gate_up, down):
        rows, weights = permute(x, slot_map, ops, w)
        active = swiglu(loop_matmul(rows, gate_up, slot_map.offsets_L), ops)
        return unpermute(loop_matmul(active, down, slot_map.offsets_L), slot_map, ops, weights)

    gradient = torch.randn(25, 16)
    results = []
    for function in (lambda *a: expert_mlp(*a, slot_map, ops), inside, outside):
        leaves = [v.clone().requires_grad_() for v in values]
        out = function(*leaves)
        out.backward(gradient)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert relative(a, b) < 2e-6


@needs_grouped_mm
def test_a_wrong_weight_gradient_would_be_seen(ops, monkeypatch):
    """The fault put back: a routing-weight gradient that forgets the activation's up half."""
    right = ops.swiglu_backward

    def wrong(gate_up, weights, gradient):
        out = right(gate_up, weights, gradient)
        return out[0], (gradient.float() * torch.nn.functional.silu(gate_up.float().chunk(2, -1)[0])).sum(-1), out[2]

    monkeypatch.setattr(ops, "swiglu_backward", wrong)
    results = run_block(ops, 20, 2, 4, torch.float32)
    assert relative(*results[2]) > 0.1
    assert relative(*results[1]) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scale(ops, dtype):
    """In place, in float32, contiguous or not, empty tensors too."""
    values = [torch.randn(5000).to(dtype), torch.randn(7, 3).to(dtype).t(), torch.empty(0, dtype=dtype)]
    factor = torch.tensor(0.3)
    want = [(v.double() * factor.double()).to(dtype) for v in values]
    ops.scale_(values, factor)
    bf16 = 2**-7 if INTERPRETED else 0  # the interpreter cuts float32 off to bf16 where devices round
    for got, wanted in zip(values, want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6 if dtype != torch.bfloat16 else bf16, atol=0)


def adamw_tensors(dtype, copies, seed=0):
    """Tensors of many shapes: whole blocks and broken ones, one element, one that begins in the middle of 16 bytes."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in [(5000,), (7, 3), (2048,), (1,), (4096, 2), (101,)]:
        weight, gradient, mean = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
        square = torch.rand(shape, generator=generator).to(dtype)
        parts = [weight, gradient, mean, square]
        if shape == (101,):
            parts = [part[1:] for part in parts]
        copy = torch.zeros_like(parts[0], dtype=torch.bfloat16) if copies else None
        found.append(AdamWTensors(*parts, copy))
    return found


def adamw_on_paper(each, step, lr, betas, eps, decay, factor):
    """One step in float64, by the textbook; ``(weight, mean, square)``."""
    weight, gradient, mean, square = (
        t.double() for t in (each.parameter, each.gradient, each.exp_avg, each.exp_avg_sq)
    )
    gradient = gradient * factor
    mean = betas[0] * mean + (1 - betas[0]) * gradient
    square = betas[1] * square + (1 - betas[1]) * gradient**2
    weight = weight * (1 - lr * decay)
    root = (square / (1 - betas[1] ** step)).sqrt() + eps
    return weight - lr * mean / (1 - betas[0] ** step) / root, mean, square


@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_adamw(ops, dtype, copies, factor):
    """Against float64; gradients stay as they are; the copy is the new weight, cast."""
    tensors = adamw_tensors(dtype, copies)
    numbers = 3, 1e-2, (0.9, 0.999), 1e-8, 0.1
    want = [adamw_on_paper(each, *numbers, factor or 1.0) for each in tensors]
    gradients = [each.gradient.clone() for each in tensors]
    ops.adamw_(tensors, AdamWNumbers.at(*numbers), None if factor is None else torch.tensor(factor))
    cut = INTERPRETED and dtype == torch.bfloat16  # the interpreter cuts float32 off to bf16 where devices round
    tolerance = {torch.float64: 1e-7, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 8e-3 if cut else 3e-3}
    for each, expected, gradient in zip(tensors, want, gradients, strict=True):
        for got, wanted in zip((each.parameter, each.exp_avg, each.exp_avg_sq), expected, strict=True):
            assert relative(got, wanted) < tolerance[dtype]
        assert torch.equal(each.gradient, gradient)
        if each.copy is not None and not INTERPRETED:
            assert torch.equal(each.copy, each.parameter.to(torch.bfloat16))
        elif each.copy is not None:
            assert relative(each.copy, each.parameter) < 8e-3


def test_adamw_takes_unequal_dtypes_and_strides(ops):
    """bf16 weights with float32 moments and gradient; weights that are not contiguous; a strided gradient."""
    weight, gradient = torch.randn(40, 30), torch.randn(40, 30)
    cases = [
        AdamWTensors(weight.bfloat16(), gradient.clone(), torch.zeros(40, 30), torch.zeros(40, 30)),
        AdamWTensors(weight.t().clone().t(), gradient.clone(), torch.zeros(40, 30), torch.zeros(40, 30)),
        AdamWTensors(weight.clone(), gradient.t().clone().t(), torch.zeros(40, 30), torch.zeros(40, 30)),
    ]
    numbers = 1, 1e-2, (0.9, 0.999), 1e-8, 0.1
    want = [adamw_on_paper(each, *numbers, 1.0) for each in cases]
    ops.adamw_(cases, AdamWNumbers.at(*numbers))
    for each, expected in zip(cases, want, strict=True):
        bf16 = each.parameter.dtype == torch.bfloat16
        assert relative(each.parameter, expected[0]) < (8e-3 if bf16 else 1e-6)
        assert relative(each.exp_avg, expected[1]) < 1e-6
        assert relative(each.exp_avg_sq, expected[2]) < 1e-6


def test_a_written_weight_is_seen_by_autograd(ops):
    """A graph that still needs the old weight or its copy fails, instead of using the new one."""
    (each, *_) = adamw_tensors(torch.float32, copies=True)
    leaf = torch.ones(5000, requires_grad=True)
    products = (leaf * each.parameter).sum(), (leaf * each.copy).sum()
    ops.adamw_([each], AdamWNumbers.at(1, 1e-2, (0.9, 0.999), 1e-8, 0.1))
    for product in products:
        with pytest.raises(RuntimeError, match="inplace"):
            product.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_square_sum(ops, dtype):
    values = [part for each in adamw_tensors(dtype, False) for part in (each.gradient, each.parameter)]
    values.append(torch.randn(30, 50).to(dtype).t())
    got = ops.square_sum(values)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(sum(v.double().square().sum().item() for v in values), rel=1e-5)
    assert got == ops.square_sum(values), "the same in every run"


def test_unknown_device_is_named():
    with pytest.raises(ValueError, match="'tpu'"):
        get_ops("tpu")
    assert set(OPS) == {"cpu", "cuda", "npu"}


@pytest.mark.skipif(INTERPRETED, reason="this is the inner run")
def test_triton_kernels_under_the_interpreter():
    """The same tests, Triton file included, in a process that started with TRITON_INTERPRET=1."""
    pytest.importorskip("triton", reason="triton is not installed (pip install --no-deps triton==3.6.0)")
    inner = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, *INNER],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert inner.returncode == 0, inner.stdout[-4000:] + inner.stderr[-2000:]
    assert " passed" in inner.stdout
