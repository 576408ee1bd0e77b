"""Expert biases in half precision: their gradient is a sum in float32 over the rows of each expert."""

from __future__ import annotations

import pytest
import torch

from hf_fsdpturbo.sharding.expert_bias import summed_in_float32
from hf_fsdpturbo.sharding.expert_parallel import ModuleExperts
from tests.support.tiny_models import FFN, HIDDEN, tiny_model

ROWS = 4096


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_four_thousand_ones_are_four_thousand(dtype: torch.dtype):
    """Stock indexing makes 256 of them in bf16."""
    bias = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
    shown = summed_in_float32({"bias": bias.view_as(bias)})["bias"]
    shown[torch.ones(ROWS, dtype=torch.long)].sum().backward()
    assert bias.grad is not None
    assert bias.grad[1].tolist() == [float(ROWS)] * 8
    assert not bias.grad[0].any()


def test_other_uses_are_as_they_were():
    """An expert at a time (the module's own loop), slices and arithmetic."""
    bias = torch.arange(8.0).view(2, 4).bfloat16()
    shown = summed_in_float32({"bias": bias})["bias"]
    for index in (1, slice(0, 1), torch.tensor(1), (..., slice(None, None, 2))):
        assert torch.equal(shown[index], bias[index])
    assert torch.equal(shown + 1, bias + 1)


def test_gpt_oss_experts_sum_their_biases_in_float32():
    """The whole experts module: 0.5 % off float32, where row by row it is 18 % and more."""
    experts = tiny_model("gpt_oss", num_experts=2, layers=1).model.layers[0].mlp.experts
    rows, expert = torch.randn(ROWS, HIDDEN), torch.arange(ROWS) % 2
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        own = experts.to(dtype)
        own.zero_grad()
        view = ModuleExperts(own, own.forward, 2)
        view.forward_rows(rows.to(dtype), expert, None).backward(torch.ones(ROWS, HIDDEN, dtype=dtype))
        gradients.append({name: p.grad.float().clone() for name, p in own.named_parameters() if name.endswith("bias")})
    truth, half = gradients
    assert truth["gate_up_proj_bias"].shape == (2, 2 * FFN)
    for name, gradient in half.items():
        assert float((gradient - truth[name]).norm() / truth[name].norm()) < 0.02, name
