"""The sweep's tools: forced choices are forced and checked, a far gradient is far, parts of a record go together."""

from __future__ import annotations

import math

import pytest
import torch

from tests.families import record as records
from tests.families.choices import Choices, GroupedMatmulsInBf16
from tests.families.nearness import Gradients, check_same_experts, rows, squares

SCORES = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])


def test_choices_are_those_of_the_other_run():
    with Choices() as truth:
        torch.topk(SCORES, 2)
        SCORES.topk(k=1, dim=0)
    moved = SCORES.clone()
    moved[0, 0] = 9.0
    with Choices(truth.made) as forced:
        values, indices = torch.topk(moved, 2, dim=-1)
        first = moved.topk(1, dim=0).indices
    forced.check_all_used()
    assert torch.equal(indices, torch.tensor([[3, 2], [0, 1]]))
    assert torch.equal(values, torch.tensor([[4.0, 3.0], [4.0, 3.0]]))
    assert torch.equal(first, torch.tensor([[1, 0, 0, 0]])) or torch.equal(first, SCORES.topk(1, dim=0).indices)
    assert forced.flipped == 2  # a row of the first call, a column of the second


def test_a_run_that_asks_less_or_otherwise_is_seen():
    with Choices() as truth:
        torch.topk(SCORES, 2)
    with Choices(truth.made) as less:
        pass
    with pytest.raises(AssertionError, match="0 top-k calls"):
        less.check_all_used()
    with Choices(truth.made), pytest.raises(AssertionError, match="chooses"):
        torch.topk(SCORES, 3)


def test_other_experts_are_seen():
    truth = Gradients(reached={"experts": [torch.tensor([[0, 1]])]})
    check_same_experts(Gradients(reached={"experts": [torch.tensor([[0, 1]])]}), truth)
    for other in ({"experts": [torch.tensor([[1, 0]])]}, {"experts": []}):
        with pytest.raises(AssertionError, match="expert"):
            check_same_experts(Gradients(reached=other), truth)


def test_autocast_that_reaches_grouped_matmuls():
    left, right = torch.randn(8, 16), torch.randn(2, 16, 16)
    with GroupedMatmulsInBf16():
        product = torch.nn.functional.grouped_mm(left, right, offs=torch.tensor([4, 8], dtype=torch.int32))
    assert product.dtype == torch.bfloat16


def _table(factor: float, elements: int, reached: float | None, seeds: int = 4):
    """One tensor, plain off by noise, ours by ``factor`` times as much: the row of it."""
    torch.manual_seed(0)
    truth = Gradients([{"w": torch.randn(elements)} for _ in range(seeds)])
    noise = [1e-2 * torch.randn(elements) for _ in range(seeds)]

    def off(by: float) -> Gradients:
        return Gradients([{"w": t["w"] + by * n} for t, n in zip(truth.by_seed, noise, strict=True)])

    distances = {"plain": squares(off(1.0), truth)}
    if reached is not None:
        distances["reached"] = squares(off(reached), truth)
    return rows(squares(off(factor), truth), distances, truth)[0]


def test_bound():
    assert _table(1.4, 1000, None).is_near
    assert not _table(1.6, 1000, None).is_near
    assert _table(1.6, 1000, 1.5).is_near  # for the one known reason
    assert not _table(1.9, 1000, 1.5).is_near
    row = _table(1.6, 1000, 1.5)
    assert row.ratio == pytest.approx(1.6, rel=1e-3)
    assert row.reached == pytest.approx(1.6 / 1.5, rel=1e-3)
    assert row.plain == pytest.approx(1e-2, rel=0.1)


def test_a_gradient_that_is_missing_counts_as_zeros():
    truth = Gradients([{"w": torch.ones(100)}])
    plain = squares(Gradients([{"w": torch.full((100,), 1.01)}]), truth)
    (row,) = rows(squares(Gradients([{}]), truth), {"plain": plain}, truth)
    assert row.ours == 1.0
    assert not row.is_near
    assert math.isfinite(row.ratio)


def _part(name: str, check: str, kind: str = "right", torch_version: str = "2") -> records.Record:
    entry = {"checks": {check: {"kind": kind, "detail": "d"}}, "architecture": "A", "plan": True}
    return {"versions": {"torch": torch_version}, "families": {name: entry}}


def test_parts_go_into_the_record():
    record = _part("a", "load")
    records.merge(record, [_part("b", "load"), _part("a", "save", "wrong")])
    assert list(record["families"]["a"]["checks"]) == ["load", "save"]
    assert record["families"]["a"]["checks"]["save"]["kind"] == "wrong"
    assert record["families"]["b"] == _part("b", "load")["families"]["b"]


def test_parts_of_other_versions_are_refused():
    with pytest.raises(ValueError, match="sweep again"):
        records.merge(_part("a", "load"), [_part("a", "load"), _part("b", "load", torch_version="3")])
    with pytest.raises(ValueError, match="lack"):
        records.merge(_part("a", "load"), [_part("b", "load", torch_version="3")])
    whole = _part("a", "load")
    records.merge(whole, [_part("a", "save", torch_version="3")])
    assert whole["versions"] == {"torch": "3"}
