"""The gate of half-precision experts beside a float32 stream: float32 inside, rounded once on the way out and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_fsdpturbo.dispatch.eager import EagerDispatcher
from hf_fsdpturbo.sharding.expert_gate import gate_in_float32

ROWS, FFN = 64, 16


class Experts(nn.Module):
    """A gate of several steps, each of which rounds in bf16."""

    def __init__(self, inside: nn.Module | None = None) -> None:
        super().__init__()
        self.inside = inside

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * torch.sigmoid(gate * 1.702) * (up + 1)


def run(experts: Experts, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.clone().requires_grad_()
    output = experts._apply_gate(rows)
    output.backward(gradient.to(output.dtype))
    return output.detach(), rows.grad


def test_computes_in_float32_and_rounds_once():
    torch.manual_seed(0)
    rows, gradient = torch.randn(ROWS, 2 * FFN).bfloat16(), torch.randn(ROWS, FFN).bfloat16()
    wide = run(Experts(), rows.float(), gradient)
    plain = run(Experts(), rows, gradient)
    experts = Experts()
    gate_in_float32(experts)
    for mine, expected, rounded in zip(run(experts, rows, gradient), wide, plain, strict=True):
        assert torch.equal(mine, expected.bfloat16())
        assert not torch.equal(rounded, expected.bfloat16()), "the gate's own steps round nothing here"
    for mine, expected in zip(run(experts, rows.float(), gradient), wide, strict=True):
        assert torch.equal(mine, expected)


def test_the_operator_of_a_plain_swiglu_does_the_same():
    from tests.support.tiny_models import tiny_model

    torch.manual_seed(0)
    rows, gradient = torch.randn(ROWS, 2 * FFN).bfloat16(), torch.randn(ROWS, FFN).bfloat16()
    experts = tiny_model("qwen3_moe").model.layers[0].mlp.experts
    wide = run(experts, rows.float(), gradient)
    gate_in_float32(experts)
    for mine, expected in zip(run(experts, rows, gradient), wide, strict=True):
        torch.testing.assert_close(mine, expected.bfloat16(), rtol=2**-8, atol=0)  # silu is another formula: an ulp
        assert (mine != expected.bfloat16()).float().mean() < 0.01


def test_a_gate_with_parameters_keeps_its_own():
    """Backward makes the gate again, outside the graph of the parameters in it."""
    experts = Experts(inside=nn.Linear(2, 2))
    gate_in_float32(experts)
    assert "_apply_gate" not in vars(experts)


class Doubled:
    """``dispatch.LocalExperts`` in bf16 that give back their rows."""

    num_local_experts, is_plain_swiglu, compute_dtype = 8, False, torch.bfloat16

    def forward_rows(self, rows_SD: Tensor, local_expert_S: Tensor, weight_S: Tensor | None) -> Tensor:
        assert rows_SD.dtype == torch.bfloat16
        return rows_SD * 1


def test_eager_adds_copies_of_a_row_in_float32():
    """Eight gradients of one float32 row, and eight outputs: each rounded to bf16 once, their sum never."""
    torch.manual_seed(0)
    rows_TD = torch.randn(5, 4, requires_grad=True)
    weights_TK = torch.rand(5, 8)
    index_TK = torch.stack([torch.randperm(8) for _ in range(5)])
    gradient = torch.randn(5, 4)
    output = EagerDispatcher(None, 8)(rows_TD, index_TK, weights_TK, Doubled())
    output.backward(gradient)
    sent = rows_TD.detach().bfloat16().float()
    copies_TKD = (gradient[:, None] * weights_TK[..., None]).bfloat16()
    torch.testing.assert_close(output, (sent[:, None] * weights_TK[..., None]).sum(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rows_TD.grad, copies_TKD.float().sum(1), rtol=1e-6, atol=1e-6)
    assert (rows_TD.grad - copies_TKD.sum(1).float()).abs().max() > 1e-4, "a sum in bf16 would pass"
