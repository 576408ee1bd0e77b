"""The aux loss of all layers in one node, against nine modeling files' own functions: loss and gradients.

``tests/unit/test_ops.py`` runs this file once more under Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.mixtral import modeling_mixtral

from hf_fsdpturbo.kernels import aux_loss
from hf_fsdpturbo.ops.table import get_ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "gpt_oss", "olmoe", "granitemoe", "jamba", "phimoe"]


@pytest.fixture(autouse=True)
def backend(monkeypatch: Any) -> None:
    """CPU tensors through the Triton file under its interpreter."""
    if INTERPRETED:
        monkeypatch.setattr(aux_loss, "get_ops", lambda kind: get_ops("cuda"))


def theirs_of(family: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), aux_loss.NAME)


def losses_and_gradients(function: Any, logits: list[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
    leaves = [each.clone().requires_grad_() for each in logits]
    loss = function(tuple(leaves), *arguments)
    return [loss.detach(), *torch.autograd.grad(0.7 * loss, leaves)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def draw(layers: int, tokens: int, experts: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(layers * tokens + experts)
    return [torch.randn(tokens, experts, generator=generator).to(dtype) for _ in range(layers)]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_functions_agree_with_it(family):
    theirs = theirs_of(family)
    assert aux_loss.distance(aux_loss.one_pass(theirs, "cpu"), theirs, "cpu") < aux_loss.TOLERANCE / 5


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("layers", "tokens", "experts", "top_k"), [(1, 7, 4, 1), (3, 70, 60, 4), (2, 301, 128, 8)])
def test_loss_and_gradients(layers, tokens, experts, top_k, masked):
    theirs = modeling_mixtral.load_balancing_loss_func
    logits = draw(layers, tokens, experts)
    mask = (torch.arange(tokens) % 3 > 0).long().reshape(1, tokens) if masked else None
    found = losses_and_gradients(aux_loss.one_pass(theirs, "cpu"), logits, experts, top_k, mask)
    expected = losses_and_gradients(theirs, logits, experts, top_k, mask)
    assert max(relative(a, b) for a, b in zip(found, expected, strict=True)) < 2e-6
    assert expected[1].abs().max() > 0


@pytest.mark.parametrize("wide", [False, True])
def test_probabilities_have_the_dtype_that_softmax_gives(wide, monkeypatch):
    """float32 under autocast on CUDA: bf16 probabilities of bf16 logits give another loss."""
    theirs = modeling_mixtral.load_balancing_loss_func
    generator = torch.Generator().manual_seed(0)
    orders = [torch.stack([torch.randperm(16, generator=generator) for _ in range(64)]) for _ in range(2)]
    logits = [(0.3 * order).bfloat16() for order in orders]  # no two of a token are equal
    if wide:
        softmax = torch.nn.functional.softmax
        as_on_cuda = functools.partial(softmax, dtype=torch.float32)
        monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, **given: as_on_cuda(x, dim))
        monkeypatch.setattr(aux_loss.torch, "softmax", lambda x, dim, **given: as_on_cuda(x, dim))
    found = losses_and_gradients(aux_loss.one_pass(theirs, "cpu"), logits, 16, 2, None)
    expected = losses_and_gradients(theirs, logits, 16, 2, None)
    cut = INTERPRETED and not wide  # the interpreter cuts float32 off to bf16 where devices round
    assert relative(found[0], expected[0]) < (5e-3 if cut else 1e-6)
    roundings = (2**-7 if INTERPRETED else 2**-8) if wide else 2**-6  # theirs rounds a product to bf16 before it sums
    assert max(relative(a, b) for a, b in zip(found[1:], expected[1:], strict=True)) < roundings
    assert found[1].dtype == torch.bfloat16


def test_equal_probabilities_choose_the_smallest_number():
    """As torch's top-k on CUDA; on CPU it chooses any, so a count by hand stands here."""
    if not INTERPRETED:
        pytest.skip("torch's top-k on CPU has no rule for equals; the Triton kernel has")
    logits = torch.zeros(5, 8)
    probs = torch.empty(5, 8)
    chosen, probable = get_ops("cuda").router_load(logits, 3, None, probs)
    assert chosen.tolist() == [5, 5, 5, 0, 0, 0, 0, 0]
    assert probable.tolist() == [0.625] * 8


def test_what_ours_does_not_know_runs_theirs():
    calls = []

    def theirs(*arguments: Any) -> str:
        calls.append(arguments)
        return "theirs"

    function = aux_loss.one_pass(theirs, "cpu")
    logits = tuple(draw(2, 6, 4))
    mask = torch.ones(1, 5)  # of other tokens
    for arguments in [
        (None,), (list(logits), 4, 2), ((), 4, 2), (logits, 5, 2), (logits, 4, 2, mask),
        (tuple(draw(1, 6, 4, torch.float64)), 4), ((logits[0], logits[1][:3]), 4, 2),
    ]:  # fmt: skip
        assert function(*arguments) == "theirs"
    assert len(calls) == 7
    assert torch.is_tensor(function(logits, 4, 2, torch.ones(2, 3)))


def test_a_compiled_model_keeps_theirs(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert aux_loss.one_pass(lambda *arguments: "theirs", "cpu")(tuple(draw(2, 6, 4)), 4, 2) == "theirs"


def test_a_second_backward_through_it_is_refused():
    logits = [each.requires_grad_() for each in draw(1, 6, 4)]
    loss = aux_loss.one_pass(modeling_mixtral.load_balancing_loss_func, "cpu")(tuple(logits), 4, 2)
    (gradient,) = torch.autograd.grad(loss**2, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_model_gets_it_where_it_agrees_and_gives_it_back(monkeypatch):
    """The family's file and Mixtral's, of which TRL takes it; one that computes otherwise stays."""
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
        output_router_logits=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    ids = torch.arange(24).reshape(2, 12)
    expected = model(ids, labels=ids).loss
    monkeypatch.setattr(aux_loss, "one_pass", lambda theirs, kind, make=aux_loss.one_pass: make(theirs, "cpu"))
    monkeypatch.setattr(aux_loss, "distance", lambda ours, theirs, kind, of=aux_loss.distance: of(ours, theirs, "cpu"))
    assert not aux_loss.apply_aux_loss(model, "cpu").undos
    own, mixtrals = theirs_of("qwen3_moe"), theirs_of("mixtral")
    done = aux_loss.apply_aux_loss(model, "cuda")
    assert done.lines == [
        f"aux loss of modeling_{name}: one pass over all layers" for name in ("qwen3_moe", "mixtral")
    ]
    assert theirs_of("qwen3_moe") is not own
    assert theirs_of("mixtral") is not mixtrals
    assert relative(model(ids, labels=ids).loss.detach(), expected.detach()) < 1e-6
    again = aux_loss.apply_aux_loss(model, "cuda")  # a second trainer of this model
    for undo in [*done.undos, *again.undos]:
        undo()
    assert (theirs_of("qwen3_moe"), theirs_of("mixtral")) == (own, mixtrals)

    def otherwise(gate_logits: Any, num_experts: int, top_k: int = 2, attention_mask: Any = None) -> torch.Tensor:
        return 2 * own(gate_logits, num_experts, top_k, attention_mask)

    monkeypatch.setattr(
        importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe"), aux_loss.NAME, otherwise
    )
    done = aux_loss.apply_aux_loss(model, "cuda")
    assert "its own, since ours is off by" in done.lines[0]
    assert theirs_of("qwen3_moe") is otherwise
    for undo in done.undos:
        undo()
