"""Expert counts equal counts by hand of what the routers chose, each real token once; in one process."""

from __future__ import annotations

import pytest
import torch

from hf_fsdpturbo.dispatch.recompute import install_routing_tape
from hf_fsdpturbo.parallelize.fused_experts import route_in_one_process
from hf_fsdpturbo.telemetry import real_tokens
from hf_fsdpturbo.telemetry.expert_counts import ExpertCounts
from hf_fsdpturbo.telemetry.real_tokens import RealTokens
from tests.support.hand_counts import HandCounts
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")


def batch(pad: str | None = "right") -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB_SIZE, (3, 10), generator=torch.Generator().manual_seed(1))
    if pad is None:
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 4, 7)):
        if missing:
            mask[row, slice(-missing, None) if pad == "right" else slice(0, missing)] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def watched(kind: str) -> tuple:
    model = tiny_model(kind).train()
    tokens = RealTokens(CPU)
    counts = ExpertCounts(model, tokens, CPU)
    handles = [*tokens.attach(model), *counts.attach()]
    return model, tokens, counts, HandCounts(model), handles


def train(model, by_hand, inputs) -> None:
    loss = model(**inputs).loss
    with by_hand.backward():
        loss.backward()


def agree(counts: ExpertCounts, reader, by_hand) -> bool:
    by_hand.end_step()
    mine = counts.by_layer(reader.local()).values()
    return all(torch.equal(a, b) for a, b in zip(mine, by_hand.steps[-1], strict=True))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "fused"])
def test_counts_equal_those_by_hand(kind: str):
    model, tokens, counts, by_hand, handles = watched("qwen3_moe" if kind == "fused" else kind)
    if kind == "fused":
        assert route_in_one_process(model).names
    reader, other = counts.reader(), counts.reader()
    install_routing_tape(model)
    for step in range(2):  # accumulation, mixed batches; the second step with recompute
        if step:
            model.activation_checkpointing_enable({"use_reentrant": False})
        for pad in ("right", "left", None):
            train(model, by_hand, batch(pad))
        with torch.no_grad():
            model(**batch())  # a reference's pass
        assert agree(counts, reader, by_hand)
    routed = sum(int(c.sum()) for c in by_hand.steps[0])
    real = 30 + 2 * (10 + 6 + 3)
    assert routed == real * model.config.num_experts_per_tok * len(counts.layers)
    assert tokens.totals.tolist()[:2] == [2 * real, 2 * (3 * 55 + 2 * (55 + 21 + 6))]
    assert int(other.local().sum()) == 2 * routed  # one reader's windows are not another's
    assert int(reader.local().sum()) == 0
    model.eval()(**batch())
    assert int(reader.local().sum()) == 0
    model.train()
    for handle in handles:
        handle.remove()
    train(model, by_hand, batch())
    assert int(reader.local().sum()) == 0


def test_faults_are_seen(monkeypatch):
    """Recompute counted twice, padding counted, evaluation counted: none goes unseen."""
    faults = {
        "recompute": lambda: monkeypatch.setattr(real_tokens, "in_backward", lambda: False),
        "padding": lambda: monkeypatch.setattr(real_tokens, "_is_mask", lambda *_: False),
    }
    for put_back in faults.values():
        with monkeypatch.context():
            model, _, counts, by_hand, _ = watched("qwen3_moe")
            install_routing_tape(model)
            model.activation_checkpointing_enable({"use_reentrant": False})
            reader = counts.reader()
            put_back()
            train(model, by_hand, batch())
            assert not agree(counts, reader, by_hand)
            monkeypatch.undo()


def test_rows_that_are_not_tokens():
    """Llama 4 hands its experts a row for each choice, LongCat-Flash one for each routed pair: they say whose."""
    tokens = RealTokens(CPU)
    tokens.rows, tokens.real_T = 3, torch.tensor([True, False, True])
    assert tokens.weights(4) is None
    assert tokens.weights(3).tolist() == [True, False, True]
    assert tokens.weights(4, torch.tensor([0, 1, 1, 2])).tolist() == [True, False, False, True]
