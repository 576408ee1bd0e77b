"""The LM head on the GPU itself: against float64, and no further from it than TRL's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(
        "no CUDA device: the same kernel runs under Triton's interpreter in tests/unit/test_linear_cross_entropy.py",
        allow_module_level=True,
    )

from trl.kernels import ChunkedLogProbFunction

from hf_fsdpturbo.lm_head import linear_cross_entropy as head
from hf_fsdpturbo.ops.table import LogitTransform, get_ops

DEVICE = "cuda"


def relative(a: Any, b: Any) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def truth(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, transform: LogitTransform) -> Any:
    leaves = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    logits = leaves[0] @ leaves[1].T * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    log_p = (logits / transform.temperature).log_softmax(-1)
    chosen = log_p.gather(1, targets[:, None]).squeeze(1)
    (-chosen.sum() / 123).backward()
    entropy = -(log_p.exp() * log_p).sum(1)
    return [chosen, entropy, *(leaf.grad for leaf in leaves)], log_p.argmax(1) == targets


def run(call: Any, hidden: torch.Tensor, weight: torch.Tensor) -> Any:
    leaves = [each.detach().clone().requires_grad_() for each in (hidden, weight)]
    log_probs, entropy, top1 = call(*leaves)
    (-log_probs.sum() / 123).backward()
    return [log_probs, entropy, *(leaf.grad for leaf in leaves)], top1


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5, 3.0, 0.8)])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(700, 5003), (1000, 32000), (3, 151936)])
def test_no_further_from_float64_than_trl(monkeypatch, tokens, vocabulary, storage, transform):
    monkeypatch.setitem(head._TILE_BYTES, "cuda", 2**24)  # several tiles
    torch.manual_seed(tokens)
    dtype = torch.bfloat16 if storage == "bfloat16" else torch.float32
    hidden = torch.randn(tokens, 256, device=DEVICE, dtype=dtype)
    weight = (torch.randn(vocabulary, 256, device=DEVICE) * 0.05).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    want, _ = truth(hidden, weight, targets, transform)

    def theirs(h: Any, w: Any) -> Any:
        outputs = ("log_probs", "entropy", "is_top1")
        found = ChunkedLogProbFunction.apply(
            h, w, None, targets, transform.temperature, 4096, transform.softcap, transform.scale, outputs
        )
        return found[0], found[1], found[4]

    with torch.autocast(DEVICE, torch.bfloat16, enabled=storage == "autocast"):
        mine, mine_top1 = run(lambda h, w: head.linear_cross_entropy(h, w, None, targets, transform), hidden, weight)
        other, other_top1 = run(theirs, hidden, weight)
    distances = [[relative(a, b) for a, b in zip(each, want, strict=True)] for each in (mine, other)]
    print(distances)
    for ours, allowed in zip(*distances, strict=True):
        assert ours <= 1.5 * allowed + 1e-6
    assert (mine_top1 != other_top1).sum() <= 1 + tokens // 100
    assert [each.dtype for each in mine] == [each.dtype for each in other]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_sum_is_not_read(dtype):
    ops = get_ops(DEVICE)
    left, right = (torch.randn(shape, device=DEVICE, dtype=dtype) for shape in ((300, 64), (64, 128)))
    total = torch.full((300, 128), float("nan"), device=DEVICE)
    ops.add_product_(total, left, right, fresh=True)
    ops.add_product_(total, left, right)
    assert relative(total, 2 * left.double() @ right.double()) < 1e-2
