"""FLA and Liger on the GPU: the chunk size seen inside the kernel, values and gradients against our float32 rule."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: FLA's kernels run nowhere else", allow_module_level=True)

from hf_fsdpturbo.arguments import KernelParams
from hf_fsdpturbo.compat import is_available
from hf_fsdpturbo.kernels import elementwise, fla, liger
from hf_fsdpturbo.kernels.apply import apply_kernels
from hf_fsdpturbo.kernels.gated_delta_rule import causal_conv1d, chunk_gated_delta_rule
from hf_fsdpturbo.kernels.linear_attention import Choice, apply_linear_attention
from hf_fsdpturbo.packing.documents import documents_from_ids
from tests.support.linear_attention_model import VOCAB, small_qwen3_5_moe

DEVICE = "cuda"
NAME = "flash-linear-attention"
BF16 = 2e-2  # ||a-b||/||b||: FLA keeps the states of chunks in bf16
REASON = fla.why_not(DEVICE)
needs_fla = pytest.mark.skipif(REASON is not None, reason=str(REASON))
needs_liger = pytest.mark.skipif(not is_available("liger_kernel"), reason="liger-kernel is not installed")


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def wide_model(seed=0):
    """Head size 128, as the released models have: the kernels are tuned for it."""
    model = small_qwen3_5_moe(seed=seed)
    config = model.config.to_dict()
    config.update(linear_key_head_dim=128, linear_value_head_dim=128)
    torch.manual_seed(seed)
    return type(model)(type(model.config)(**config)).to(DEVICE, torch.bfloat16)


def batch():
    ids = torch.randint(0, VOCAB, (2, 300), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    positions = torch.cat([torch.arange(n) for n in (100, 7, 193)]).expand(2, -1).to(DEVICE)
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}


def rule_inputs(length, key_heads, value_heads, rows=1):
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=DEVICE)

    return {
        "query": draw(rows, length, key_heads, 128), "key": draw(rows, length, key_heads, 128),
        "value": draw(rows, length, value_heads, 128), "g": -draw(rows, length, value_heads).abs(),
        "beta": draw(rows, length, value_heads).sigmoid(),
    }  # fmt: skip


def run(rule, drawn, dtype, probe, **kwargs):
    x = {n: t.to(torch.float32 if n == "g" else dtype).requires_grad_() for n, t in drawn.items()}
    out, _ = rule(**x, use_qk_l2norm_in_kernel=True, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, list(x.values()), probe.to(out.dtype))]


@needs_fla
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunk_size_arrives_inside_the_kernel(monkeypatch, chunk_size):
    import importlib

    inner = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    seen = {"forward": [], "backward": []}
    for name, calls in (("fwd", seen["forward"]), ("bwd", seen["backward"])):
        original = getattr(inner, f"chunk_gated_delta_rule_{name}")

        def record(*args, original=original, calls=calls, **kwargs):
            calls.append(kwargs["chunk_size"])
            return original(*args, **kwargs)

        monkeypatch.setattr(inner, f"chunk_gated_delta_rule_{name}", record)
    model = wide_model()
    report = apply_kernels(model, KernelParams([NAME], None, chunk_size), DEVICE)
    assert not report.notices, report.notices
    for calls in seen.values():
        calls.clear()  # the trial
    model(**batch()).loss.backward()
    report.close()
    assert seen == {"forward": [chunk_size] * 3, "backward": [chunk_size] * 3}


@needs_fla
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("lengths", [[2048], [1000, 1, 63, 984]])
def test_values_and_gradients(chunk_size, lengths):
    drawn = rule_inputs(sum(lengths), 16, 32)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(DEVICE)
    probe = torch.randn_like(drawn["value"])
    found = run(
        fla.chunk_rule, drawn, torch.bfloat16, probe, chunk_size=chunk_size, initial_state=None,
        output_final_state=False, cu_seqlens=None, documents=documents_from_ids(ids),
    )  # fmt: skip
    expected = run(chunk_gated_delta_rule, drawn, torch.float32, probe, document_ids=ids)
    distances = {n: relative(a, b) for n, a, b in zip(("out", *drawn), found, expected, strict=True)}
    print(f"chunk {chunk_size}, documents {lengths}: {distances}")
    assert max(distances.values()) < BF16, distances


@needs_fla
def test_documents_of_several_rows_stay_apart():
    drawn = rule_inputs(256, 2, 4, rows=3)
    ids = (torch.arange(256, device=DEVICE) >= torch.tensor([[10], [128], [255]], device=DEVICE)).long()
    probe = torch.randn_like(drawn["value"])
    kwargs = {"chunk_size": 64, "initial_state": None, "output_final_state": False, "cu_seqlens": None}
    found = run(fla.chunk_rule, drawn, torch.bfloat16, probe, documents=documents_from_ids(ids), **kwargs)
    leaking = run(fla.chunk_rule, drawn, torch.bfloat16, probe, documents=None, **kwargs)
    expected = run(chunk_gated_delta_rule, drawn, torch.float32, probe, document_ids=ids)
    assert relative(found[0], expected[0]) < BF16
    assert relative(leaking[0], expected[0]) > 2 * BF16


@needs_fla
def test_convolution():
    x = torch.randn(2, 64, 300, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(64, 4, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    ids = (torch.arange(300, device=DEVICE) >= 123).long().expand(2, -1)
    found = fla.conv(x, weight, None, "silu", cu_seqlens=None, documents=documents_from_ids(ids))
    expected = causal_conv1d(x.float(), weight.float(), None, "silu", document_ids=ids)
    assert relative(found, expected) < BF16
    probe = torch.randn_like(found)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), probe.to(y.dtype)) for y in (found, expected)), strict=True):
        assert relative(a, b) < BF16


@needs_fla
def test_kernels_on_and_off_give_the_same_loss():
    model = wide_model()
    undos = apply_linear_attention(model, Choice(frozenset(), frozenset(), 64))
    losses = {"off": model(**batch()).loss.item()}
    for undo in undos:
        undo()
    for label, params in {
        "fla": KernelParams([NAME], None, 16),
        "fla and auto": KernelParams(["auto", NAME], None, 64),
    }.items():
        report = apply_kernels(model, params, DEVICE)
        losses[label] = model(**batch()).loss.item()
        report.close()
    print(losses)
    assert max(losses.values()) - min(losses.values()) < 2e-2, losses


@needs_liger
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_liger_norms_and_rotation(dtype):
    model = small_qwen3_5_moe().to(DEVICE, dtype)
    with torch.no_grad():
        for module in model.modules():
            if elementwise.norm_kind(module):
                module.weight.normal_()
    expected = model(**batch()).loss
    grads = torch.autograd.grad(expected, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    undos = elementwise.fuse_norms(model, liger.rms_norm, DEVICE)
    undos += elementwise.fuse_rotary(model, liger.rotary, DEVICE, "liger")
    assert len(undos) == 2 * 4 + 2 + 1 + 1
    found = model(**batch()).loss
    fused = torch.autograd.grad(found, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    for undo in undos:
        undo()
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    assert abs(found - expected) < tolerance
    total = [torch.cat([g.flatten().float() for g in gs if g is not None]) for gs in (fused, grads)]
    assert relative(*total) < tolerance


def test_our_rule_on_the_gpu_equals_the_cpu():
    drawn = rule_inputs(200, 2, 4)
    probe = torch.randn_like(drawn["value"])
    here = run(chunk_gated_delta_rule, drawn, torch.float32, probe)
    cpu = {n: t.cpu() for n, t in drawn.items()}
    for a, b in zip(here, run(chunk_gated_delta_rule, cpu, torch.float32, probe.cpu()), strict=True):
        assert relative(a.cpu(), b) < 1e-3  # TF32 may be on
