"""RMSNorm, rotary and SwiGLU replacements: recognised by value, same numbers, put back; NPU and Liger stand-ins."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as interleaved_rotation
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from hf_fsdpturbo.kernels import elementwise, liger, npu_elementwise
from hf_fsdpturbo.kernels.accelerator_set import AUTO, apply_auto, apply_liger
from tests.support.linear_attention_model import VOCAB, install_module, small_qwen3_5_moe
from tests.support.torch_npu_stand_in import TorchNpuStandIn


def small_qwen3_moe():
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, moe_intermediate_size=16, intermediate_size=48, num_experts=4,
        num_experts_per_tok=2, mlp_only_layers=[1],
    ))  # fmt: skip


def randomise_norms(model):
    for module in model.modules():
        if elementwise.norm_kind(module):
            nn.init.normal_(module.weight, mean=0.5)
    return model


def loss_and_gradients(model):
    ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("build", "mlps"), [(small_qwen3_moe, 1), (small_qwen3_5_moe, 4)])
def test_npu_kernels_give_the_same_loss_and_gradients(monkeypatch, build, mlps):
    stand_in = TorchNpuStandIn().install(monkeypatch)
    model = randomise_norms(build())
    expected = loss_and_gradients(model)
    classes = [type(module) for module in model.modules()]
    applied = AUTO["npu"](model, "cpu")  # the tensors of this test are on the CPU
    assert_same(loss_and_gradients(model), expected)
    assert set(stand_in.calls) == {"npu_rms_norm", "npu_rotary_mul", "npu_swiglu"}
    assert f"npu_swiglu in {mlps} MLPs; experts run in the dispatcher" in applied.lines[0]
    for undo in applied.undos:
        undo()
    stand_in.calls.clear()
    assert [type(module) for module in model.modules()] == classes
    assert_same(loss_and_gradients(model), expected)
    assert not stand_in.calls


def test_a_wrong_operator_is_seen(monkeypatch):
    """The comparison above can fail: gate and up swapped."""
    stand_in = TorchNpuStandIn()
    stand_in.npu_swiglu = lambda x, dim=-1: x.chunk(2, dim)[0] * F.silu(x.chunk(2, dim)[1])
    stand_in.install(monkeypatch)
    model = small_qwen3_moe()
    expected = loss_and_gradients(model)
    applied = AUTO["npu"](model, "cpu")
    with pytest.raises(AssertionError):
        assert_same(loss_and_gradients(model), expected)
    for undo in applied.undos:
        undo()


def test_tensors_elsewhere_run_the_models_own_code(monkeypatch):
    stand_in = TorchNpuStandIn().install(monkeypatch)
    model = small_qwen3_moe()
    applied = apply_auto(model, "npu")
    loss_and_gradients(model)
    assert not stand_in.calls
    for undo in applied.undos:
        undo()


def test_a_torch_npu_without_an_operator_is_an_error(monkeypatch):
    TorchNpuStandIn().install(monkeypatch, without=("npu_rotary_mul",))
    with pytest.raises(ValueError, match="npu_rotary_mul, which torch-npu lacks"):
        apply_auto(small_qwen3_moe(), "npu")


def test_no_torch_npu_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="torch-npu"):
        apply_auto(small_qwen3_moe(), "npu")


def liger_stand_in(monkeypatch, calls):
    class LigerRMSNormFunction:
        @staticmethod
        def apply(x, weight, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
            assert not in_place
            calls.append(f"rms_norm {casting_mode} {offset}")
            y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
            return (y * (weight.float() + offset)).to(x.dtype)

    def rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        assert q.shape[-1] == cos.shape[-1]
        calls.append("rope")
        return elementwise._torch_rotation(q, k, cos, sin)

    install_module(monkeypatch, "liger_kernel.ops", LigerRMSNormFunction=LigerRMSNormFunction)
    install_module(monkeypatch, "liger_kernel.transformers.rope", liger_rotary_pos_emb=rope)


@pytest.mark.parametrize(("build", "norm"), [
    (small_qwen3_moe, "rms_norm llama 0.0"), (small_qwen3_5_moe, "rms_norm gemma 1.0"),
])  # fmt: skip
def test_liger_kernels_give_the_same_loss_and_gradients(monkeypatch, build, norm):
    calls = []
    liger_stand_in(monkeypatch, calls)
    model = randomise_norms(build())
    expected = loss_and_gradients(model)
    undos = elementwise.fuse_norms(model, liger.rms_norm, "cpu")
    undos += elementwise.fuse_rotary(model, liger.rotary, "cpu", "liger")
    assert_same(loss_and_gradients(model), expected)
    assert set(calls) == {norm, "rope"}
    for undo in undos:
        undo()


def test_auto_on_cuda_without_liger_says_so_and_liger_by_name_is_an_error(monkeypatch):
    monkeypatch.setattr("hf_fsdpturbo.compat.is_available", lambda name: False)
    monkeypatch.setattr("hf_fsdpturbo.kernels.accelerator_set.is_available", lambda name: False)
    model = small_qwen3_moe()
    assert "liger-kernel is not installed" in apply_auto(model, "cuda").notices[0]
    with pytest.raises(ValueError, match="liger-kernel"):
        apply_liger(model, "cuda", "kernel_config name 'liger'")


def test_liger_after_auto_is_not_applied_twice(monkeypatch):
    from hf_fsdpturbo.arguments import KernelParams
    from hf_fsdpturbo.kernels.apply import apply_kernels

    liger_stand_in(monkeypatch, [])
    model = small_qwen3_moe()
    report = apply_kernels(model, KernelParams(["auto", "liger"]), "cuda")
    assert "already applied by auto" in " ".join(report.lines)
    names = {type(module).__name__ for module in model.modules() if "RMSNorm" in type(module).__name__}
    assert names == {"FusedQwen3MoeRMSNorm"}
    report.close()


def test_liger_that_matches_nothing_is_an_error(monkeypatch):
    from hf_fsdpturbo.arguments import KernelParams
    from hf_fsdpturbo.kernels.apply import apply_kernels

    liger_stand_in(monkeypatch, [])
    with pytest.raises(ValueError, match="'liger' matches nothing in Linear"):
        apply_kernels(nn.Linear(2, 2), KernelParams(["liger"]), "cuda")


def test_recognition_is_by_value():
    model = small_qwen3_5_moe()
    kinds = {type(m).__name__: elementwise.norm_kind(m) for m in model.modules()}
    assert kinds["Qwen3_5MoeRMSNorm"] == "zero_centred"
    assert kinds["Qwen3_5MoeRMSNormGated"] is None
    assert {elementwise.norm_kind(m) for m in small_qwen3_moe().modules()} == {None, "plain"}

    class SquaredRMSNorm(nn.Module):  # the right name, another formula
        def __init__(self, size, eps=1e-6):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

        def forward(self, x):
            return x / (x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    assert elementwise.norm_kind(SquaredRMSNorm(4)) is None
    assert elementwise.is_half_rotation(modeling_qwen3_5_moe.apply_rotary_pos_emb)
    assert not elementwise.is_half_rotation(interleaved_rotation)


def test_recognition_works_while_a_model_is_being_made_on_meta():
    with torch.device("meta"):
        model = small_qwen3_5_moe()
        kinds = [elementwise.norm_kind(m) for m in model.modules()]
        assert kinds.count("zero_centred") == 2 * 4 + 2 + 1
        assert sum(elementwise.is_swiglu(m) for m in model.modules()) == 4
        assert elementwise.is_half_rotation(modeling_qwen3_5_moe.apply_rotary_pos_emb)


def test_a_copied_model_keeps_its_own_weights(monkeypatch):
    TorchNpuStandIn().install(monkeypatch)
    model = small_qwen3_moe()
    undos = elementwise.fuse_norms(model, npu_elementwise.rms_norm, "cpu")
    twin = copy.deepcopy(model)
    nn.init.constant_(twin.model.norm.weight, 3.0)
    x = torch.randn(2, 32)
    torch.testing.assert_close(twin.model.norm(x), 3 * model.model.norm(x))
    assert isinstance(model.model.norm, type(small_qwen3_moe().model.norm))
    for undo in undos:
        undo()
