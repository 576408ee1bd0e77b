"""Our chunk rule and convolution against the recurrence, one document at a time, values and gradients, in float64.

Shape legend: B batch, S sequence, Hk / Hv key / value heads, Dk / Dv head sizes.
"""

import pytest
import torch

from hf_fsdpturbo.kernels import gated_delta_rule
from hf_fsdpturbo.kernels.causal_conv import causal_conv1d
from hf_fsdpturbo.kernels.gated_delta_rule import chunk_gated_delta_rule
from hf_fsdpturbo.kernels.state_walk import walk
from hf_fsdpturbo.packing.documents import document_ids_from_cu_seqlens

NAMES = ("query", "key", "value", "g", "beta")


def recurrence(query, key, value, g, beta, state=None):
    """The defining loop over tokens (l2-normalised q and k), any float dtype; independent of the chunked code."""
    normalise = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key)]
    groups = value.shape[2] // key.shape[2]
    q, k = (x.repeat_interleave(groups, dim=2) for x in normalise)
    if state is None:
        state = value.new_zeros(value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    outs = []
    for t in range(value.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = (value[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], error)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * key.shape[-1] ** -0.5)
    return torch.stack(outs, 1), state


def inputs(batch, length, key_heads=2, value_heads=4, key_dim=8, value_dim=6, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = {
        "query": draw(batch, length, key_heads, key_dim),
        "key": draw(batch, length, key_heads, key_dim),
        "value": draw(batch, length, value_heads, value_dim),
        "g": -draw(batch, length, value_heads).abs(),
        "beta": draw(batch, length, value_heads).sigmoid(),
    }
    return {name: value.requires_grad_() for name, value in values.items()}


def call(x, **kwargs):
    return chunk_gated_delta_rule(
        x["query"], x["key"], x["value"], g=x["g"], beta=x["beta"], use_qk_l2norm_in_kernel=True, **kwargs
    )


def document_by_document(x, rows):
    """rows: per row, the document lengths. The recurrence started anew for each."""
    outs = []
    for row, lengths in enumerate(rows):
        parts = [tensor[row : row + 1].split(lengths, 1) for tensor in x.values()]
        outs.append(torch.cat([recurrence(*document)[0] for document in zip(*parts, strict=True)], 1))
    return torch.cat(outs)


def gradients(out, x):
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weight).sum(), list(x.values()))


def ids_of(rows):
    return torch.stack([torch.repeat_interleave(torch.arange(len(r)), torch.tensor(r)) for r in rows])


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("length", [1, 16, 50, 129])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_equals_the_recurrence(chunk_size, length, key_heads):
    x = inputs(2, length, key_heads=key_heads)
    out, state = call(x, chunk_size=chunk_size, output_final_state=True)
    expected, expected_state = recurrence(*x.values())
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, expected_state, rtol=1e-10, atol=1e-12)
    for name, got, want in zip(NAMES, gradients(out, x), gradients(expected, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


ROWS = [[[40, 1, 23, 64, 7]], [[16, 16, 16], [1, 46, 1], [48]], [[1, 1, 1, 1, 61]], [[64, 64, 3]]]


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_documents_do_not_read_each_other(rows, chunk_size):
    x = inputs(len(rows), sum(rows[0]))
    out, _ = call(x, chunk_size=chunk_size, document_ids=ids_of(rows))
    expected = document_by_document(x, rows)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    for got, want in zip(gradients(out, x), gradients(expected, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_the_document_test_can_fail(monkeypatch):
    """The fault put back: ids accepted and not used, as on stock Transformers."""
    masks = gated_delta_rule._masks
    monkeypatch.setattr(gated_delta_rule, "_masks", lambda ids, *rest: masks(None, *rest))
    with pytest.raises(AssertionError):
        test_documents_do_not_read_each_other(ROWS[0], 16)


def test_seq_idx_and_cu_seqlens_mean_the_same():
    rows = [[20, 30, 5]]
    x = inputs(1, 55)
    expected, _ = call(x, document_ids=ids_of(rows))
    assert torch.equal(call(x, seq_idx=ids_of(rows).int())[0], expected)
    cu_seqlens = torch.tensor([0, 20, 50, 55], dtype=torch.int32)
    assert torch.equal(call(x, cu_seqlens=cu_seqlens)[0], expected)
    out, states = call(x, cu_seqlens=cu_seqlens, output_final_state=True)
    torch.testing.assert_close(out, expected)
    assert states.shape == (3, 4, 8, 6)
    last = recurrence(*(t[:, 50:] for t in x.values()))[1]
    torch.testing.assert_close(states[2:], last)


def test_state_goes_in_and_out():
    x = inputs(2, 90)
    first, state = call({n: t[:, :37] for n, t in x.items()}, output_final_state=True)
    second, _ = call({n: t[:, 37:] for n, t in x.items()}, initial_state=state)
    torch.testing.assert_close(torch.cat((first, second), 1), recurrence(*x.values())[0], rtol=1e-10, atol=1e-12)


def test_state_continues_the_first_document_only():
    x = inputs(1, 30)
    start = torch.randn(1, 4, 8, 6, dtype=torch.float64)
    out, state = call(x, initial_state=start, document_ids=ids_of([[10, 20]]), chunk_size=16, output_final_state=True)
    head, _ = recurrence(*(t[:, :10] for t in x.values()), state=start)
    tail, last = recurrence(*(t[:, 10:] for t in x.values()))
    torch.testing.assert_close(out, torch.cat((head, tail), 1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-12)


def test_an_id_that_comes_back_is_a_new_document():
    x = inputs(1, 30)
    back = torch.tensor([[0] * 10 + [1] * 10 + [0] * 10])
    assert torch.equal(call(x, document_ids=back)[0], call(x, document_ids=ids_of([[10, 10, 10]]))[0])


def test_agrees_with_transformers_in_float32_and_bfloat16():
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule as theirs

    theirs = getattr(theirs, "__wrapped__", theirs)
    for dtype in (torch.float32, torch.bfloat16):
        x = {n: t.detach().to(torch.float32 if n == "g" else dtype) for n, t in inputs(2, 100).items()}
        out, state = call(x, output_final_state=True)
        expected, expected_state = theirs(
            x["query"], x["key"], x["value"], g=x["g"], beta=x["beta"], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert out.dtype == dtype
        assert state.dtype == torch.float32
        torch.testing.assert_close(out, expected, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-6)
        torch.testing.assert_close(state, expected_state, rtol=1e-5, atol=1e-6)


def test_backward_makes_no_full_length_tensor_per_chunk():
    """Quadratic backwards show as autograd nodes that scatter into the full length, one per chunk."""
    counts = {}
    for length in (64, 512):
        out, _ = call(inputs(1, length), chunk_size=16)
        seen, todo, names = set(), [out.grad_fn], []
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            names.append(type(node).__name__)
            todo.extend(parent for parent, _ in node.next_functions)
        scatters = ("SelectBackward", "SliceBackward", "CopySlices", "IndexPut")
        counts[length] = sum(name.startswith(scatters) for name in names)
    assert counts[64] == counts[512]


@pytest.mark.parametrize("name", ["A_log", "scale", "cp_context", "use_gate_in_kernel"])
def test_refuses_what_would_change_the_result(name):
    with pytest.raises(ValueError, match=name):
        call(inputs(1, 4), **{name: torch.ones(1)})


def test_refuses_sizes_that_do_not_fit():
    x = inputs(2, 4)
    with pytest.raises(ValueError, match="flattened batch"):
        call(x, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="expected \\[B, S\\]"):
        call(x, document_ids=torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="must divide the value heads"):
        call(inputs(1, 4, key_heads=3))
    with pytest.raises(ValueError, match="chunk_size=0"):
        call(x, chunk_size=0)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution_stays_inside_documents(rows, activation):
    length = sum(rows[0])
    x = torch.randn(len(rows), 5, length, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    out = causal_conv1d(x, weight, bias, activation, document_ids=ids_of(rows))
    expected = torch.cat([
        torch.cat([causal_conv1d(part, weight, bias, activation) for part in x[i : i + 1].split(r, 2)], 2)
        for i, r in enumerate(rows)
    ])  # fmt: skip
    torch.testing.assert_close(out, expected)
    probe = torch.randn_like(out)
    for got, want in zip(*(torch.autograd.grad(o, (x, weight, bias), probe) for o in (out, expected)), strict=True):
        torch.testing.assert_close(got, want)
    leaking = causal_conv1d(x, weight, bias, activation)
    if any(len(r) > 1 for r in rows):
        assert not torch.allclose(leaking, expected)


def test_convolution_agrees_with_transformers():
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

    theirs = getattr(modeling_qwen3_5_moe.causal_conv1d_fn, "__wrapped__", modeling_qwen3_5_moe.causal_conv1d_fn)
    x, weight = torch.randn(2, 5, 20).bfloat16(), torch.randn(5, 4).bfloat16()
    assert torch.equal(causal_conv1d(x, weight, activation="silu"), theirs(x, weight, activation="silu"))
    one = torch.zeros(2, 20, dtype=torch.int32)
    torch.testing.assert_close(
        causal_conv1d(x, weight, activation="silu", seq_idx=one), theirs(x, weight, activation="silu")
    )


def test_convolution_extends_short_ids_over_cached_columns():
    x, weight = torch.randn(1, 3, 13), torch.randn(3, 4)
    out = causal_conv1d(x, weight, document_ids=ids_of([[4, 6]]))
    torch.testing.assert_close(out, causal_conv1d(x, weight, document_ids=ids_of([[7, 6]])))


def test_cu_seqlens_to_ids():
    ids = document_ids_from_cu_seqlens(torch.tensor([0, 2, 3, 6], dtype=torch.int32), 6)
    assert ids.tolist() == [[0, 0, 1, 2, 2, 2]]


def test_the_walk_has_its_own_gradients():
    """Every argument, the first and the last state included, against finite differences in float64."""
    generator = torch.Generator().manual_seed(0)
    chunks, matrices, size, key_dim, value_dim = 3, 2, 4, 3, 2
    shapes = [(size, value_dim), (size, key_dim), (size, size), (size, key_dim), (size, key_dim), ()]
    x = [torch.randn(chunks, matrices, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    x.append(torch.randn(matrices, key_dim, value_dim, generator=generator, dtype=torch.float64))
    assert torch.autograd.gradcheck(walk, [t.requires_grad_() for t in x])


def test_autocast_does_not_round_the_rule():
    x = {name: value.detach().float() for name, value in inputs(1, 100).items()}
    expected, _ = call(x)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = call(x)
    assert torch.equal(found, expected)
