"""Our expert block in one process, without a trainer: the model's own numbers, by function and by registry name."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_fsdpturbo import enable_fused_experts
from hf_fsdpturbo.ops.weight_copies import WeightCopies
from hf_fsdpturbo.parallelize.fused_experts import FusedForward, dispatcher_alone, route_in_one_process
from tests.support.adapter_runs import lora
from tests.support.compare import distance
from tests.support.tiny_models import tiny_config, tiny_model

PLAIN = ("qwen3_moe", "qwen3_5_moe", "mixtral", "deepseek_v3")
IDS = torch.randint(3, 384, (2, 24), generator=torch.Generator().manual_seed(1))


def results(model, autocast: bool = False, micro_batches: int = 1) -> dict[str, torch.Tensor]:
    """Logits and all gradients of training steps' backward."""
    model.train()
    model.zero_grad()
    for number in range(micro_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(input_ids=IDS + number, labels=IDS + number, use_cache=False)
        output.loss.backward()
    found = {"logits": output.logits.detach().float(), "loss": output.loss.detach().float()}
    return found | {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(distance(a[name], b[name]) for name in a if not name.endswith(("A_log", "dt_bias")))


def own_dtype_left(model) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


@pytest.mark.parametrize("kind", PLAIN)
def test_float32_equals_the_models_own_experts(kind):
    plain, ours = tiny_model(kind), tiny_model(kind)
    found = enable_fused_experts(ours)
    assert found.names
    assert not found.kept
    assert worst(results(ours, micro_batches=2), results(plain, micro_batches=2)) < 1e-5


@pytest.mark.parametrize("kind", PLAIN)
def test_the_registry_name_does_the_same(kind):
    enable_fused_experts()
    plain, ours = tiny_model(kind), tiny_model(kind)
    ours.set_experts_implementation("fsdpturbo")
    assert worst(results(ours), results(plain)) < 1e-5
    blocks = [m.fsdpturbo_block for m in ours.modules() if hasattr(m, "fsdpturbo_block")]
    assert blocks
    assert all(isinstance(block, FusedForward) for block in blocks)
    ours.set_experts_implementation("eager")  # generation switches so, and back
    assert worst(results(ours), results(plain)) < 1e-5


def test_a_model_is_built_with_the_name_and_keeps_it_out_of_its_config(tmp_path):
    enable_fused_experts()
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"), experts_implementation="fsdpturbo")
    results(model)
    model.save_pretrained(tmp_path)
    assert "fsdpturbo" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.layers[0].mlp.experts.down_proj, model.model.layers[0].mlp.experts.down_proj)


def test_experts_of_another_kind_keep_their_own_forward(capsys):
    plain, ours, named = (tiny_model("gpt_oss") for _ in range(3))
    found = enable_fused_experts(ours)
    assert not found.names
    assert "keep their own forward: they are not a plain gated SwiGLU" in capsys.readouterr().out
    named.set_experts_implementation("fsdpturbo")
    expected = results(plain)
    assert worst(results(ours), expected) == 0.0
    assert worst(results(named), expected) < 1e-5


def test_bf16_autocast_is_no_further_from_float32_than_autocast_linears():
    """Transformers' eager experts call ``linear``, which autocast reaches: the same dtype as ours."""
    truth, eager, ours = (tiny_model("qwen3_moe") for _ in range(3))
    eager.set_experts_implementation("eager")
    enable_fused_experts(ours)
    expected = results(truth)
    theirs, mine = (results(model, autocast=True) for model in (eager, ours))
    for name, tensor in expected.items():
        far, allowed = distance(mine[name], tensor), distance(theirs[name], tensor)
        assert far <= 1.2 * allowed + 2e-4, (name, far, allowed)
    assert own_dtype_left(ours) == {torch.float32}
    experts = ours.model.layers[0].mlp.experts
    assert experts.forward.copies.nbytes() == 2 * sum(p.numel() for p in experts.parameters())
    assert experts.down_proj.grad.dtype == torch.float32


def test_recompute_equals_the_forward_under_autocast_and_accumulation():
    plain, ours = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    for model in (plain, ours):
        enable_fused_experts(model)
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for autocast in (False, True):
        a, b = (results(model, autocast, micro_batches=2) for model in (ours, plain))
        assert worst(a, b) < 1e-6


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_on_experts_are_right(when, autocast):
    from peft import get_peft_model

    def adapted(ours: bool):
        model = tiny_model("qwen3_moe")
        model.set_experts_implementation("eager")
        if ours and when == "before":
            assert enable_fused_experts(model).names
        torch.manual_seed(3)
        model = get_peft_model(model, lora())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.02)
        if ours and when == "after":
            assert enable_fused_experts(model).names
        return model

    plain, ours = adapted(False), adapted(True)
    a, b = results(ours, autocast), results(plain, autocast)
    assert any("experts" in name and "lora_A" in name for name in a)
    assert worst(a, b) < (5e-2 if autocast else 1e-5)


def test_generation_and_evaluation_after_training_see_the_new_weights():
    ours = tiny_model("qwen3_moe")
    enable_fused_experts(ours)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        results(ours, autocast=True)
        optimizer.step()
        plain = tiny_model("qwen3_moe")
        plain.load_state_dict(ours.state_dict())
        enable_fused_experts(plain)
        with torch.autocast("cpu", torch.bfloat16):
            made, expected = (
                model.eval().generate(IDS[:, :8], max_new_tokens=6, do_sample=False, pad_token_id=0)
                for model in (ours, plain)
            )
        assert torch.equal(made, expected)


def test_a_stale_copy_would_be_seen(monkeypatch):
    """The fault: copies that outlive the step. Two steps under autocast then leave the right weights."""

    def after_two_steps() -> dict[str, torch.Tensor]:
        model = tiny_model("qwen3_moe")
        enable_fused_experts(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for _ in range(2):
            found = results(model, autocast=True)
            optimizer.step()
        return found

    right = after_two_steps()
    monkeypatch.setattr(WeightCopies, "forget", lambda self: None)
    assert worst(after_two_steps(), right) > 1e-3


def test_a_copied_model_runs_its_own_weights():
    ours = tiny_model("qwen3_moe")
    enable_fused_experts(ours)
    results(ours, autocast=True)
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    fresh = tiny_model("qwen3_moe")
    fresh.load_state_dict(twin.state_dict())
    assert worst(results(twin), results(fresh)) < 1e-5
    assert twin.model.layers[0].mlp.experts.forward.module is twin.model.layers[0].mlp.experts


def test_what_grouped_matmuls_do_not_take_runs_the_own_forward():
    plain, ours = tiny_model("qwen3_moe").double(), tiny_model("qwen3_moe").double()
    for model in (plain, ours):
        model.set_experts_implementation("eager")
    enable_fused_experts(ours)
    assert worst(results(ours), results(plain)) == 0.0


def test_torch_compile_traces_the_own_forward():
    plain, ours = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    enable_fused_experts(ours)
    block = ours.model.layers[0].mlp.experts
    hidden, index = torch.randn(6, 32), torch.randint(0, 8, (6, 2))
    weights = torch.rand(6, 2)
    calls = []
    own, block.forward.forward = block.forward.forward, lambda *args: calls.append(1) or own(*args)
    compiled = torch.compile(lambda *args: block(*args), backend="eager")
    expected = plain.model.layers[0].mlp.experts(hidden, index, weights)
    assert distance(compiled(hidden, index, weights), expected) < 1e-6
    assert calls


def test_a_second_call_changes_nothing():
    ours = tiny_model("qwen3_moe")
    first = route_in_one_process(ours)
    forward = ours.model.layers[0].mlp.experts.forward
    assert route_in_one_process(ours) == first
    assert ours.model.layers[0].mlp.experts.forward is forward


def test_weights_that_accelerate_moves_keep_their_own_forward():
    from accelerate.hooks import ModelHook, add_hook_to_module

    ours = tiny_model("qwen3_moe")
    add_hook_to_module(ours.model.layers[0].mlp.experts, ModelHook())
    assert hasattr(ours.model.layers[0].mlp.experts, "_hf_hook")
    found = route_in_one_process(ours)
    assert len(found.names) == 1
    assert list(found.kept.values()) == [["model.layers.0.mlp.experts"]]


def test_experts_that_transformers_spreads_keep_their_own_forward():
    ours = tiny_model("qwen3_moe")
    enable_fused_experts(ours)
    for layer in ours.model.layers:
        assert layer.mlp.experts._is_expert_parallel is False, "upstream's flag"
        layer.mlp.experts._is_expert_parallel = True
        layer.mlp.experts.forward.dispatcher = None  # would fail if it were called
    assert worst(results(ours), results(tiny_model("qwen3_moe"))) == 0.0


def test_the_dispatcher_of_one_process():
    class Args:
        torch_compile = False

        def __init__(self, name: str) -> None:
            self.fsdpturbo_params = type("Params", (), {"ep_dispatcher": name})

    assert [dispatcher_alone(Args(name))[0] for name in ("eager", "fused", "auto")] == ["eager", "fused", "auto"]
    dispatcher, note = dispatcher_alone(Args("domino"))
    assert dispatcher == "fused"
    assert "nothing to exchange" in note
    compiled = Args("auto")
    compiled.torch_compile = True
    assert dispatcher_alone(compiled)[0] == "eager"
