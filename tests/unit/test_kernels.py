"""kernel_config: its errors, which rule a model runs with which chunk size, and that everything is put back."""

import gc
import os
import sys

import pytest
import torch
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

from hf_fsdpturbo.arguments import KernelParams
from hf_fsdpturbo.compat import MissingDependencyError
from hf_fsdpturbo.kernels import fla, linear_attention, rebinding
from hf_fsdpturbo.kernels.apply import apply_kernels
from hf_fsdpturbo.kernels.fla_trial import TrialSizes, trial
from hf_fsdpturbo.kernels.linear_attention import trial_sizes
from hf_fsdpturbo.kernels.rebinding import CONV, RECURRENT, RULE, current_rule, linear_attention_layers
from tests.support.fla_stand_in import FlaStandIn
from tests.support.linear_attention_model import VOCAB, install_module, small_qwen3_5_moe

GLOBALS = (RULE, RECURRENT, CONV, "apply_rotary_pos_emb")
FLA = "flash-linear-attention"


@pytest.fixture(autouse=True, scope="module")
def collections_are_short():
    """Each test ends with a full collection: not of all that was there before these tests (0.3 s each)."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def originals_come_back(monkeypatch):
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    before = {name: getattr(modeling, name) for name in GLOBALS}
    yield
    gc.collect()
    assert {name: getattr(modeling, name) for name in GLOBALS} == before
    assert not rebinding._FILES


def forward(model, ids, **kwargs):
    return model(input_ids=ids, use_cache=False, **kwargs).logits


def packed(lengths=(20, 40), rows=1):
    ids = torch.randint(0, VOCAB, (rows, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)
    return ids, positions


# ---- errors of kernel_config ----

BAD = [
    ({"name": "turbo"}, "unknown"),
    ({"name": ""}, "selects nothing"),
    ({"name": FLA, "include_kernels": ""}, "selects nothing"),
    ({"name": FLA, "include_kernels": "chunk_gated_delta_rule, other"}, "'other' is unknown"),
    ({"name": FLA, "include_kernels": False}, "include_kernels"),
    ({"name": FLA, "chunk_size": 48}, "chunk_size"),
    ({"name": FLA, "chunk_size": 128}, "chunk_size"),
    ({"name": FLA, "chunk_size": True}, "chunk_size"),
    ({"name": FLA, "chunk_size": "64"}, "chunk_size"),
    ({"name": "auto", "chunk_size": 16}, "only acts on"),
    ({"name": FLA, "chunks": 16}, "Unknown params"),
    ({"chunk_size": 16}, "name"),
]


@pytest.mark.parametrize(("config", "words"), BAD, ids=str)
def test_bad_kernel_config(config, words):
    with pytest.raises(ValueError, match=words):
        KernelParams.from_mapping(config)


def test_the_documented_config_parses():
    params = KernelParams.from_mapping({
        "name": "auto, flash-linear-attention",
        "include_kernels": "chunk_gated_delta_rule, fused_recurrent_gated_delta_rule", "chunk_size": 64,
    })  # fmt: skip
    assert params.name == ["auto", FLA]
    assert params.include_kernels == ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
    assert KernelParams.from_mapping({"name": FLA, "include_kernels": True}).include_kernels is None


def test_an_operator_that_matches_no_module():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                            num_experts=2, moe_intermediate_size=8, vocab_size=16, head_dim=8)  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with pytest.raises(ValueError, match="match no module of Qwen3MoeForCausalLM"):
        apply_kernels(model, KernelParams([FLA], ["chunk_gated_delta_rule"], 16), "cpu")
    report = apply_kernels(model, None, "cpu")
    assert not report.undos
    assert not model._forward_pre_hooks


def test_liger_off_cuda_is_an_error_and_leaves_nothing_behind():
    with pytest.raises(ValueError, match="Liger's kernels need CUDA, not cpu"):
        apply_kernels(small_qwen3_5_moe(), KernelParams([FLA, "liger"], None, 16), "cpu")


def test_liger_after_an_auto_that_had_no_liger_is_still_an_error(monkeypatch):
    monkeypatch.setattr("hf_fsdpturbo.compat.is_available", lambda name: False)
    monkeypatch.setattr("hf_fsdpturbo.kernels.accelerator_set.is_available", lambda name: False)
    for names in (["liger"], ["auto", "liger"]):
        with pytest.raises(MissingDependencyError, match="kernel_config name 'liger'"):
            apply_kernels(small_qwen3_5_moe(), KernelParams(names), "cuda")


def test_unknown_accelerator():
    with pytest.raises(ValueError, match="knows no kernels for xpu"):
        apply_kernels(small_qwen3_5_moe(1), KernelParams(["auto"]), "xpu")


# ---- which rule runs ----


def test_cpu_says_that_auto_is_empty_and_that_fla_cannot_run(caplog):
    model = small_qwen3_5_moe()
    report = apply_kernels(model, KernelParams(["auto", FLA], None, 16), "cpu")
    text = " ".join(report.notices)
    assert "auto is empty on cpu" in text
    assert "chunk size 16 on cpu, because flash-linear-attention has no cpu kernels" in text
    assert all(notice in caplog.text for notice in report.notices)
    report.close()


def test_no_kernel_config_still_keeps_documents_apart():
    model = small_qwen3_5_moe().eval()
    ids, positions = packed(rows=2)
    with torch.no_grad():
        alone = torch.cat([forward(model, part) for part in ids.split((20, 40), 1)], 1)
        stock = forward(model, ids, position_ids=positions)
        report = apply_kernels(model, None, "cpu")
        ours = forward(model, ids, position_ids=positions)
        lengths = torch.tensor([0, 20, 60], dtype=torch.int32)
        by_lengths = forward(model, ids[:1], position_ids=positions[:1], cu_seq_lens_q=lengths)
        report.close()
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(by_lengths, alone[:1], rtol=1e-5, atol=1e-6)
    assert (stock - alone).abs().max() > 1e-4  # the fault of stock Transformers, which this test must see


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunk_size_reaches_fla_in_every_layer(monkeypatch, chunk_size):
    stand_in = FlaStandIn().install(monkeypatch)
    model = small_qwen3_5_moe()
    report = apply_kernels(model, KernelParams([FLA], None, chunk_size), "cpu")
    stand_in.calls.clear()  # the trial
    ids, positions = packed(rows=2)
    out = forward(model, ids, position_ids=positions)
    lengths = [0, 20, 60, 80, 120]
    assert stand_in.calls == [("conv", None, lengths), ("chunk", chunk_size, lengths)] * 3
    report.close()
    monkeypatch.undo()
    report = apply_kernels(model, None, "cpu")
    torch.testing.assert_close(out, forward(model, ids, position_ids=positions), rtol=1e-4, atol=1e-5)
    report.close()


def test_transformers_own_way_drops_the_chunk_size(monkeypatch):
    """The fault that the plugin corrects, seen by the same stand-in: kwargs are filtered by FLA's named parameters."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    stand_in = FlaStandIn().install(monkeypatch)
    decorate = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")
    theirs = decorate(lambda query, key, value, g, beta, **kwargs: None)
    q = torch.randn(1, 8, 2, 8)
    g = torch.zeros(1, 8, 2)
    theirs(q, q, q, g=g, beta=g, chunk_size=16)
    assert stand_in.calls == [("chunk", 64, None)]


def test_flash_qla_is_off_when_a_chunk_size_is_asked(monkeypatch):
    FlaStandIn().install(monkeypatch)
    monkeypatch.delenv("FLA_FLASH_QLA")
    apply_kernels(small_qwen3_5_moe(), None, "cpu").close()
    assert "FLA_FLASH_QLA" not in os.environ
    apply_kernels(small_qwen3_5_moe(), KernelParams([FLA], None, 32), "cpu").close()
    assert os.environ["FLA_FLASH_QLA"] == "0"
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    report = apply_kernels(small_qwen3_5_moe(), KernelParams([FLA], None, 32), "cpu")
    assert any("chunk_size=32 has no effect" in notice for notice in report.notices)
    report.close()


def test_a_config_without_fla_does_not_run_fla(monkeypatch):
    stand_in = FlaStandIn().install(monkeypatch)
    model = small_qwen3_5_moe()
    report = apply_kernels(model, KernelParams(["auto"]), "cpu")
    forward(model, packed()[0])
    assert not stand_in.calls
    report.close()


def test_include_kernels_filters(monkeypatch):
    stand_in = FlaStandIn().install(monkeypatch)
    model = small_qwen3_5_moe().eval()
    report = apply_kernels(model, KernelParams([FLA], ["fused_recurrent_gated_delta_rule"], 16), "cpu")
    assert any("chunk_gated_delta_rule is not included and stays PyTorch" in line for line in report.lines)
    stand_in.calls.clear()
    model.generate(packed()[0][:, :10], max_new_tokens=3, do_sample=False)
    assert {name for name, _, _ in stand_in.calls} == {"recurrent"}
    report.close()


def test_tensors_on_another_device_never_reach_fla(monkeypatch):
    stand_in = FlaStandIn().install(monkeypatch)
    model = small_qwen3_5_moe()
    choice = linear_attention.Choice(frozenset({"chunk_gated_delta_rule"}), frozenset({"cuda"}), 16)
    undos = linear_attention.apply_linear_attention(model, choice)
    forward(model, packed()[0])
    assert not stand_in.calls
    for undo in undos:
        undo()


def test_generation_is_the_same(monkeypatch):
    model = small_qwen3_5_moe().eval()
    ids = packed()[0][:, :10]
    stock = model.generate(ids, max_new_tokens=6, do_sample=False)
    for install in (False, True):
        if install:
            FlaStandIn().install(monkeypatch)
        report = apply_kernels(model, KernelParams([FLA], None, 16), "cpu")
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), stock)
        report.close()


# ---- an unusable FLA is found at the start ----


class GuardedFLA:
    """FLA 0.6 on Hopper with Triton 3.6: its gated backward raises unless the flag says that Triton is right."""

    def __init__(self, monkeypatch, scale=1.0):
        stand_in = FlaStandIn().install(monkeypatch)
        install_module(monkeypatch, "fla.ops.common.chunk_o", TRITON_ABOVE_3_7_1=False)
        self.module, self.stand_in = sys.modules["fla.ops.common.chunk_o"], stand_in
        inner = stand_in.chunk_gated_delta_rule
        stand_in.scale = scale

        def guarded(*args, **kwargs):
            if not self.module.TRITON_ABOVE_3_7_1:
                raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results")
            return inner(*args, **kwargs)

        monkeypatch.setattr(sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", guarded)


def test_what_fla_refuses_by_version_is_judged_by_values(monkeypatch):
    guarded = GuardedFLA(monkeypatch)
    model = small_qwen3_5_moe()
    report = apply_kernels(model, KernelParams([FLA], None, 16), "cpu")
    assert not report.notices
    guarded.stand_in.calls.clear()
    forward(model, packed()[0])
    assert guarded.stand_in.calls, "FLA runs"
    report.close()


def test_what_is_wrong_stays_refused(monkeypatch):
    guarded = GuardedFLA(monkeypatch, scale=1.1)
    report = apply_kernels(small_qwen3_5_moe(), KernelParams([FLA], None, 16), "cpu")
    assert "is wrong in a trial step" in report.notices[0]
    assert guarded.module.TRITON_ABOVE_3_7_1 is False, "the refusal is back"
    report.close()


def test_the_trial_asks_what_the_run_will_ask():
    model = small_qwen3_5_moe()
    layer = next(linear_attention_layers(model))[1]
    sizes = trial_sizes(model, 32, cp_size=2, length=300)
    assert (sizes.key_heads, sizes.value_heads) == (layer.num_k_heads // 2, layer.num_v_heads // 2)
    assert (sizes.key_dim, sizes.value_dim) == (layer.head_k_dim, layer.head_v_dim)
    assert (sizes.chunk_size, sizes.length) == (32, 300)


def test_missing_fla_and_missing_triton_are_named(monkeypatch):
    monkeypatch.setattr(fla, "is_available", lambda name: False)
    assert "not installed" in fla.why_not("npu")
    monkeypatch.setattr(fla, "is_available", lambda name: True)
    install_module(monkeypatch, "fla.ops")
    assert "cannot be imported" in fla.why_not("npu")
    assert "no xpu kernels" in fla.why_not("xpu")


@pytest.mark.parametrize(("error", "scale", "words"), [
    (RuntimeError("0 active drivers"), 1.0, "failed in a trial step"),
    (None, 1.1, "wrong in a trial step"),
    (None, float("nan"), "wrong in a trial step"),
])  # fmt: skip
def test_the_trial_finds_a_broken_fla(monkeypatch, error, scale, words):
    stand_in = FlaStandIn().install(monkeypatch)
    stand_in.error, stand_in.scale = error, scale
    model = small_qwen3_5_moe()
    report = apply_kernels(model, KernelParams([FLA], None, 16), "cpu")
    assert words in report.notices[0]
    stand_in.calls.clear()
    forward(model, packed()[0])
    assert not stand_in.calls
    report.close()


@pytest.mark.parametrize(("error", "scale", "words"), [
    (RuntimeError("no conv kernel"), 1.0, "convolution failed in a trial step"),
    (None, 1.1, "convolution is wrong in a trial step"),
])  # fmt: skip
def test_the_trial_finds_a_broken_convolution(monkeypatch, error, scale, words):
    stand_in = FlaStandIn().install(monkeypatch)
    stand_in.conv_error, stand_in.conv_scale = error, scale
    report = apply_kernels(small_qwen3_5_moe(), KernelParams([FLA], None, 16), "cpu")
    assert words in report.notices[0]
    report.close()


def test_a_failed_trial_names_another_chunk_size(monkeypatch):
    stand_in = FlaStandIn().install(monkeypatch)
    stand_in.error = RuntimeError("No valid warp partition for T.gemm: M=16")
    for chunk_size, advised in ((16, True), (32, True), (64, False)):
        text, _ = trial(torch.device("cpu"), TrialSizes(1, 2, 16, 16, chunk_size=chunk_size, length=80))
        assert (f"at chunk size {chunk_size} (chunk_size 64 may work): No valid warp" in text) == advised
        assert "No valid warp partition" in text


def test_the_trial_works_while_a_model_is_being_made_on_meta(monkeypatch):
    stand_in = FlaStandIn().install(monkeypatch)
    with torch.device("meta"), torch.no_grad():
        model = small_qwen3_5_moe()
        report = apply_kernels(model, KernelParams([FLA], None, 16), "cpu")
    assert not report.notices
    assert stand_in.calls[0][:2] == ("chunk", 16)
    report.close()


# ---- process-wide state ----


def test_two_models_share_settings_and_others_are_refused():
    first, second = small_qwen3_5_moe(), small_qwen3_5_moe()
    params = KernelParams([FLA], None, 16)
    one, two = apply_kernels(first, params, "cpu"), apply_kernels(second, params, "cpu")
    with pytest.raises(ValueError, match="Two models of .*ask for different kernels settings"):
        apply_kernels(small_qwen3_5_moe(), KernelParams([FLA], None, 32), "cpu")
    rule = current_rule(first)
    one.close()
    one.close()
    assert current_rule(second) is rule
    two.close()
    apply_kernels(first, KernelParams([FLA], None, 32), "cpu").close()


def test_a_model_that_is_gone_lets_go():
    model = small_qwen3_5_moe()
    model.cycle = model
    apply_kernels(model, KernelParams([FLA], None, 16), "cpu")
    del model
    report = apply_kernels(small_qwen3_5_moe(), KernelParams([FLA], None, 32), "cpu")
    report.close()


def test_context_parallelism_can_build_on_top():
    model = small_qwen3_5_moe()
    report = apply_kernels(model, None, "cpu")
    inner, seen = current_rule(model), []

    def outer(*args, documents=None, **kwargs):
        seen.append(documents)
        return inner(*args, documents=documents, **kwargs)

    undo = rebinding.rebind(model, rule=outer, conv=rebinding.current_conv(model), key=("ulysses", 2))
    ids, positions = packed()
    forward(model, ids, position_ids=positions)
    assert [d.cu_seqlens_cpu.tolist() for d in seen] == [[0, 20, 60]] * 3
    with pytest.raises(ValueError, match="different context_parallel settings"):
        rebinding.rebind(model, rule=outer, conv=outer, key=("ulysses", 4))
    undo()
    assert current_rule(model) is inner
    report.close()


def test_the_moe_path_is_not_touched():
    model = small_qwen3_5_moe()
    before = [(type(m), m.__dict__.get("forward")) for n, m in model.named_modules() if n.endswith("experts")]
    report = apply_kernels(model, KernelParams(["auto", FLA], None, 16), "cpu")
    assert [(type(m), m.__dict__.get("forward")) for n, m in model.named_modules() if n.endswith("experts")] == before
    report.close()
