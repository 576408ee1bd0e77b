"""Adapters: the same numbers and gradients as the family's own code, before anything is sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_fsdpturbo.expert_adapters import adapt_block, adapt_experts, grouped_swiglu
from hf_fsdpturbo.model_spec import FSDPTurboEPModelSpec
from hf_fsdpturbo.telemetry import expert_counts
from hf_fsdpturbo.telemetry.real_tokens import RealTokens
from tests.families.listing import families
from tests.families.tiny import tiny_config
from tests.support.compare import distance


def _model(name: str, **fields: Any) -> Any:
    import transformers

    family = families()[name]
    config = tiny_config(transformers.CONFIG_MAPPING[family.model_type], name)
    for field, value in fields.items():
        setattr(config, field, value)
    torch.manual_seed(0)
    model = getattr(transformers, family.architecture)(config).float()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


def _blocks(model: Any) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in ("Llama4TextMoe", "LongcatFlashMoE")]


@pytest.mark.parametrize("is_transposed", [False, True])
def test_grouped_swiglu_is_a_loop_over_experts(is_transposed: bool):
    """Transformers' function reads flags such as ``_is_expert_parallel`` and ``_apply_gate`` from what it is given."""
    torch.manual_seed(0)
    gate_up, down = torch.randn(4, 16, 8), torch.randn(4, 8, 8)
    rows, index, weights = torch.randn(5, 8), torch.tensor([[0, 2], [2, 0], [1, 2], [0, 1], [2, 1]]), torch.rand(5, 2)
    expected = torch.zeros(5, 8)
    for token in range(5):
        for place in range(2):
            gate, up = (gate_up[index[token, place]] @ rows[token]).chunk(2)
            row = down[index[token, place]] @ (nn.functional.silu(gate) * up)
            expected[token] += weights[token, place] * row
    stacks = (gate_up.mT.contiguous(), down.mT.contiguous()) if is_transposed else (gate_up, down)
    found = grouped_swiglu(
        rows, index, weights, gate_up=stacks[0], down=stacks[1], act_fn=nn.SiLU(), is_transposed=is_transposed
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


CASES = {
    "llama4": ("llama4", {}),
    "llama4_top_3": ("llama4", {"num_experts_per_tok": 3}),
    "longcat_flash": ("longcat_flash", {}),
    "longcat_flash_without_identity": ("longcat_flash", {"zero_expert_num": 0}),
}


@pytest.mark.parametrize("case", CASES)
def test_block_is_the_familys_own(case: str):
    """Output, and the gradients of input, router, shared expert and every expert."""
    name, fields = CASES[case]
    plain = _model(name, **fields)
    adapted = copy.deepcopy(plain)
    FSDPTurboEPModelSpec.get(adapted).prepare(adapted)
    assert _blocks(plain)
    for theirs, mine in zip(_blocks(plain), _blocks(adapted), strict=True):
        assert mine.forward.__func__ is not type(mine).forward
        results = []
        for block in (theirs, mine):
            torch.manual_seed(1)
            rows = torch.randn(2, 9, 32, requires_grad=True)
            output = block(rows)
            outputs: tuple[Tensor, ...] = output if isinstance(output, tuple) else (output,)
            sum((out * torch.randn_like(out)).sum() for out in outputs).backward()
            results.append([*outputs, rows.grad, *(p.grad for p in block.parameters())])
        for their, my in zip(*results, strict=True):
            assert my.shape == their.shape
            assert distance(my.detach(), their.detach()) < 1e-6


@pytest.mark.parametrize("name", ["llama4", "longcat_flash"])
def test_preparing_twice_is_preparing_once(name: str):
    model = _model(name)
    spec = FSDPTurboEPModelSpec.get(model)
    spec.prepare(model)
    calls = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    experts = next(iter(spec.find_experts(model).values()))
    experts.num_experts = 4  # as sharding leaves it
    spec.prepare(model)
    assert experts.num_experts == 4
    assert [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)] == calls


def test_deep_copies_run_their_own_weights():
    block = nn.Linear(2, 2)
    adapt_block(block, lambda self, rows: rows @ self.weight)
    experts = nn.Linear(2, 2)
    adapt_experts(experts, lambda self, rows, index, weights: rows @ self.weight, num_experts=2)
    for module, others in ((block, ()), (experts, (None, None))):
        other = copy.deepcopy(module)
        other.weight.data.zero_()
        rows = torch.ones(1, 2)
        assert not other(rows, *others).any()
        assert module(rows, *others).any()


@pytest.mark.parametrize("case", ["llama4_top_3", "longcat_flash"])
def test_padding_is_told_where_rows_are_not_tokens(case: str, monkeypatch):
    """A padded batch is counted as its rows alone: experts say whose token each of their rows is."""
    name, fields = CASES[case]
    model = _model(name, **fields).train()
    FSDPTurboEPModelSpec.get(model).prepare(model)
    experts = {n: (m, m.num_experts) for n, m in model.named_modules() if "num_experts" in vars(m) and "experts" in n}
    monkeypatch.setattr(expert_counts, "counted_modules", lambda _: experts)
    tokens = RealTokens(torch.device("cpu"))
    counts = expert_counts.ExpertCounts(model, tokens, torch.device("cpu"))
    tokens.attach(model)
    counts.attach()
    ids, mask = torch.randint(3, 60, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[1, 3:] = 0
    reader = counts.reader()
    model(input_ids=ids, attention_mask=mask, use_cache=False)
    padded = reader.local()
    model(input_ids=ids[:1], use_cache=False)
    model(input_ids=ids[1:, :3], use_cache=False)
    assert experts
    assert padded.sum() > 0
    assert torch.equal(padded, reader.local())
