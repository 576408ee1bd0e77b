"""Our expert block in one process on the GPU itself: autocast, recompute, the fused optimizer, generation."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: the same runs on CPU in tests/unit/test_fused_experts.py", allow_module_level=True)

from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_fsdpturbo import enable_fused_experts
from hf_fsdpturbo.dispatch import kept_attention
from hf_fsdpturbo.dispatch.recompute import install_routing_tape, keep_or_make

IDS = torch.randint(3, 384, (4, 64), generator=torch.Generator().manual_seed(1))
PLAIN = "eager"  # experts of linear layers, which autocast reaches


def model(implementation: str | None, key_heads: int = 2) -> Qwen3MoeForCausalLM:
    """A small model; None: with our block."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=384, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=key_heads, head_dim=32, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=4,
    )  # fmt: skip
    made = Qwen3MoeForCausalLM(config).cuda()
    if implementation is None:
        assert len(enable_fused_experts(made).names) == 2
    else:
        made.set_experts_implementation(implementation)
    return made


def gradients(made: Qwen3MoeForCausalLM, autocast: bool = True, micro_batches: int = 2) -> torch.Tensor:
    made.train()
    made.zero_grad()
    for number in range(micro_batches):
        ids = (IDS + number).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = made(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return torch.cat([parameter.grad.float().flatten() for parameter in made.parameters()])


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def test_float32_equals_plain():
    assert far(gradients(model(None), False), gradients(model(PLAIN), False)) < 1e-4


def test_autocast_is_no_further_from_float32_than_plain():
    truth = gradients(model(PLAIN), False)
    mine, theirs = far(gradients(model(None)), truth), far(gradients(model(PLAIN)), truth)
    print(f"ours {mine:.2e}, plain {theirs:.2e}")
    assert mine <= 1.2 * theirs


def test_recompute_equals_the_forward():
    ours, again = model(None), model(None)
    again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert far(gradients(again), gradients(ours)) < 1e-3


@pytest.mark.parametrize("backend", ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_selective_recompute_runs_no_attention_again(backend, monkeypatch):
    asked, made = [], []

    def counted(make):
        def once():
            made.append(1)
            return make()

        asked.append(1)
        return keep_or_make(once)

    monkeypatch.setattr(kept_attention, "keep_or_make", counted)
    ours, again = model(None, 4), model(None, 4)  # the efficient kernel takes no grouped heads
    install_routing_tape(again, keeps=True)
    assert kept_attention.keep_attention(again) == ({"sdpa"}, set())
    again.activation_checkpointing_enable({"use_reentrant": False})
    with sdpa_kernel(getattr(SDPBackend, backend)):
        assert far(gradients(again), gradients(ours)) < 1e-3
    assert len(made) == 2 * 2, "a layer and micro-batch"
    assert len(asked) == 2 * len(made), "the recompute asked too"


def test_generation_after_fused_steps_sees_the_new_weights():
    ours, fresh = model(None), model(None)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        gradients(ours)
        optimizer.step()
        ours.eval()
        fresh.load_state_dict(ours.state_dict())
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            mine, expected = (made.eval()(input_ids=IDS.cuda()).logits.float() for made in (ours, fresh))
            made = ours.generate(IDS[:, :8].cuda(), max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert far(mine, expected) < 1e-6
        assert made.shape == (4, 16)


def test_the_registry_name_and_bf16_weights():
    enable_fused_experts()
    named, plain = model("fsdpturbo").bfloat16(), model("grouped_mm").bfloat16()
    assert far(gradients(named, False), gradients(plain, False)) < 2e-2
