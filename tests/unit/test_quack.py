"""quack's grouped matmul is used where it is there, agrees and is faster; else torch's, and nothing breaks."""

import pytest
import torch

from hf_fsdpturbo.ops import quack
from hf_fsdpturbo.ops import torch as plain

OFFSETS = torch.tensor([3, 3, 10], dtype=torch.int32)


def stand_in(left, right, out=None, cu_seqlens_m=None, cu_seqlens_k=None, tuned=True):
    """quack's call: bounds with a leading zero; a product by groups of rows, or by groups of what is summed."""
    assert tuned is False
    if cu_seqlens_m is not None:
        return plain.grouped_mm(left, right, cu_seqlens_m[1:])
    return out.copy_(plain.grouped_mm(left, right, cu_seqlens_k[1:]))


def operands(kind):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(10, 8, generator=generator).bfloat16()
    if kind == "rows":
        return rows, torch.randn(3, 8, 16, generator=generator).bfloat16()
    return rows.t(), torch.randn(10, 16, generator=generator).bfloat16()


@pytest.mark.parametrize("kind", ["rows", "sums"])
def test_the_call_is_torchs(monkeypatch, kind):
    monkeypatch.setattr(quack, "_gemm", lambda: stand_in)
    left, right = operands(kind)
    assert torch.equal(quack._quack(left, right, OFFSETS), plain.grouped_mm(left, right, OFFSETS))


def test_bounds_are_made_once_for_a_block(monkeypatch):
    """Six products share the ends of their groups; other ends have other bounds."""
    seen = []

    def gemm(left, right, out=None, cu_seqlens_m=None, **given):
        seen.append(cu_seqlens_m)
        return stand_in(left, right, out, cu_seqlens_m, **given)

    monkeypatch.setattr(quack, "_gemm", lambda: gemm)
    left, right = operands("rows")
    offsets, others = OFFSETS.clone(), torch.tensor([1, 5, 10], dtype=torch.int32)
    for ends in (offsets, offsets, others):
        assert torch.equal(quack._quack(left, right, ends), plain.grouped_mm(left, right, ends))
    assert seen[0] is seen[1]
    assert [bounds.tolist() for bounds in seen[1:]] == [[0, 3, 3, 10], [0, 1, 5, 10]]


@pytest.mark.parametrize(("gemm", "times", "chosen"), [
    (stand_in, (1.0, 2.0), True),
    (stand_in, (2.0, 1.0), False),
    (lambda *a, **k: stand_in(*a, **k) * 1.1, (1.0, 2.0), False),
    (lambda *a, **k: stand_in(*a, **k) * float("nan"), (1.0, 2.0), False),
    (lambda *a, **k: 1 / 0, (1.0, 2.0), False),
])  # fmt: skip
def test_the_choice(monkeypatch, gemm, times, chosen):
    monkeypatch.setattr(quack, "_gemm", lambda: gemm)
    milliseconds = dict(zip((quack._quack, plain.grouped_mm), times, strict=True))
    monkeypatch.setattr(quack, "_milliseconds", lambda function, *_: milliseconds[function])
    assert quack._choose(*operands("rows"), OFFSETS, (8, 3, 8, 16)) is chosen


def test_without_a_gpu_it_is_not_asked(monkeypatch):
    monkeypatch.setattr(quack, "ENOUGH_SLOTS", 1)
    monkeypatch.setattr(quack, "_gemm", lambda: pytest.fail("asked"))
    left, right = operands("rows")
    assert torch.equal(quack.grouped_mm(left, right, OFFSETS), plain.grouped_mm(left, right, OFFSETS))
