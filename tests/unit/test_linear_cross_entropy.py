"""The LM head whose gradients are made in its forward, against plain log_softmax in float64 and against TRL's own.

``tests/unit/test_ops.py`` runs this file once more under Triton's interpreter.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from hf_fsdpturbo.lm_head import linear_cross_entropy as head
from hf_fsdpturbo.ops import torch as torch_ops
from hf_fsdpturbo.ops.table import LogitTransform, get_ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

TRANSFORMS = [
    LogitTransform(),
    LogitTransform(scale=0.3, softcap=1.5),
    LogitTransform(scale=2.0, temperature=0.7),
    LogitTransform(softcap=0.8, temperature=1.3),
]


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """CPU tensors through the Triton file under its interpreter; small tiles, so that there are several."""
    if INTERPRETED:
        monkeypatch.setattr(head, "get_ops", lambda kind: get_ops("cuda"))
    monkeypatch.setattr(head, "_ROWS", 8)
    monkeypatch.setattr(head, "_SMALL_TILE_BYTES", 1)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def draw(
    tokens: int, vocabulary: int, dtype: torch.dtype = torch.float32, hidden: int = 16, bias: bool = False
) -> Any:
    generator = torch.Generator().manual_seed(tokens + vocabulary)
    shapes = [(tokens, hidden), (vocabulary, hidden), (vocabulary,)]
    values = [(0.5 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return values[: 3 if bias else 2], targets


def plain(values: list[torch.Tensor], targets: torch.Tensor, transform: LogitTransform) -> tuple[torch.Tensor, ...]:
    logits = torch.nn.functional.linear(*values) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    log_p = (logits / transform.temperature).log_softmax(-1)
    chosen = log_p.gather(1, targets[:, None]).squeeze(1)
    return chosen, -(log_p.exp() * log_p).sum(1), log_p.argmax(1) == targets


def both(values: Any, targets: Any, transform: Any, factor: float = -0.37, need: Any = (True, True, True)) -> Any:
    """Results and gradients of ours and of float64, pairwise; a gradient that is not needed is None on both sides."""
    found = []
    for dtype in (None, torch.float64):
        leaves = [v.to(dtype or v.dtype).clone().requires_grad_(n) for v, n in zip(values, need, strict=False)]
        bias = leaves[2] if len(leaves) > 2 else None
        results = (
            head.linear_cross_entropy(*leaves[:2], bias, targets, transform)
            if dtype is None
            else plain(leaves, targets, transform)
        )
        if any(need[: len(leaves)]):
            (results[0].sum() * factor).backward()
        found.append([*results, *(leaf.grad for leaf in leaves)])
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(21, 37), (8, 130), (1, 5), (17, 64)])
def test_float32(tokens, vocabulary, bias, transform):
    log_probs, entropy, top1, *gradients = both(*draw(tokens, vocabulary, bias=bias), transform)
    assert log_probs[0].dtype == entropy[0].dtype == torch.float32
    assert torch.equal(*top1)
    for got, want in (log_probs, entropy, *gradients):
        assert relative(got, want) < 2e-6


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is slow, and blocks of Triton are 4096 wide on a device")
def test_many_tokens_in_the_torch_file(monkeypatch):
    """Blocks of rows inside a tile."""
    monkeypatch.setattr(torch_ops, "_LOGITS_AT_ONCE", 100)
    for got, want in both(*draw(50, 41), TRANSFORMS[1]):
        assert relative(got, want) < 2e-6


@pytest.mark.skipif(not INTERPRETED, reason="for the Triton file: more than one block of the vocabulary")
def test_wide_vocabulary():
    for got, want in both(*draw(3, 9000, hidden=4), TRANSFORMS[1]):
        assert relative(got, want) < 2e-6


@pytest.mark.skipif(INTERPRETED, reason="the Triton file works in float32")
def test_float64_stays_float64():
    results = both(*draw(9, 31, torch.float64), LogitTransform(softcap=2.0))
    assert results[0][0].dtype == torch.float64
    for got, want in results:
        assert relative(got, want) < 1e-13


@pytest.mark.parametrize("need", [(True, False), (False, True), (False, False)])
def test_frozen_parts(need):
    """LoRA: the head has no gradient, and none is made; only what is needed is."""
    results = both(*draw(10, 33), LogitTransform(), need=need)
    for wanted, (got, want) in zip(need, results[3:], strict=True):
        assert (got is not None) == wanted
        if wanted:
            assert relative(got, want) < 2e-6


def test_no_gradient_is_allocated_for_a_frozen_head():
    (hidden, weight), targets = draw(10, 33)
    log_probs, *_ = head.linear_cross_entropy(hidden.requires_grad_(), weight, None, targets)
    assert [gradient is not None for gradient in log_probs.grad_fn.gradients] == [True, False, False]


def test_tied_head_adds_to_the_embedding():
    (_, weight), targets = draw(12, 40)
    ids = torch.arange(12)
    found = []
    ours = lambda h, w: head.linear_cross_entropy(h, w, None, targets)[0]  # noqa: E731
    for call in (ours, lambda h, w: plain([h, w], targets, LogitTransform())[0]):
        leaf = weight.clone().requires_grad_()
        call(torch.nn.functional.embedding(ids, leaf) * 0.5, leaf).mean().backward()
        found.append(leaf.grad)
    assert relative(*found) < 2e-6


def test_no_labels_at_all():
    """A rank whose slice has no label: zeros, and the graph is whole."""
    (hidden, weight), targets = draw(0, 11)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    log_probs, entropy, top1 = head.linear_cross_entropy(*leaves, None, targets)
    assert log_probs.shape == entropy.shape == top1.shape == (0,)
    log_probs.sum().backward()
    assert leaves[0].grad.shape == (0, 16)
    assert leaves[1].grad.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_sum_is_not_read(dtype):
    ops = get_ops("cuda" if INTERPRETED else "cpu")
    left, right, total = torch.randn(5, 3).to(dtype), torch.randn(3, 7).to(dtype), torch.full((5, 7), float("nan"))
    ops.add_product_(total, left, right, fresh=True)
    ops.add_product_(total, left, right)
    assert relative(total, 2 * left.float() @ right.float()) < 1e-6


def test_the_first_of_equal_logits_is_the_top():
    hidden, weight = torch.ones(3, 2), torch.ones(6, 2)
    weight[0] = 0
    *_, top1 = head.linear_cross_entropy(hidden, weight, None, torch.tensor([1, 2, 0]))
    assert top1.tolist() == [True, False, False]


def test_other_weights_are_refused():
    """The fault this function could do silently: positions that weigh differently."""
    (hidden, weight), targets = draw(6, 20)
    log_probs, *_ = head.linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), None, targets)
    with pytest.raises(ValueError, match=r"fused_linear_cross_entropy.*weighs all positions alike.*'off'"):
        (log_probs * log_probs.detach().exp()).sum().backward()


def test_one_backward_a_forward():
    (hidden, weight), targets = draw(6, 20)
    log_probs, *_ = head.linear_cross_entropy(hidden, weight.requires_grad_(), None, targets)
    loss = log_probs.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward needs another forward"):
        loss.backward()


def test_a_nan_goes_on():
    """What is not finite is named by others: here it must not read as different weights."""
    (hidden, weight), targets = draw(6, 20)
    log_probs, *_ = head.linear_cross_entropy(hidden, weight.requires_grad_(), None, targets)
    (log_probs.sum() * float("nan")).backward()
    assert weight.grad.isnan().all()


def distances(call: Any, values: Any, targets: Any) -> list[float]:
    """To float64, of log-probabilities and gradients, with the loss of a step: minus the mean."""
    leaves = [v.clone().requires_grad_() for v in values]
    log_probs = call(*leaves)
    (-log_probs.sum() / 123).backward()
    exact = [v.double().requires_grad_() for v in values]
    want = plain(exact, targets, LogitTransform())[0]
    (-want.sum() / 123).backward()
    return [relative(log_probs, want), *(relative(a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts bf16 off where devices round")
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_no_further_from_float64_than_trl(autocast):
    """Weights stored in bf16, and in float32 under autocast (the weight is cast once); at most 1.5 times as far."""
    trl = pytest.importorskip("trl.kernels")
    values, targets = draw(120, 700, torch.float32 if autocast else torch.bfloat16, hidden=64)
    values[1] *= 0.4

    def theirs(hidden: Any, weight: Any) -> Any:
        return trl.ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 256, None, 1.0, ("entropy",))[0]

    def ours(hidden: Any, weight: Any) -> Any:
        return head.linear_cross_entropy(hidden, weight, None, targets)[0]

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mine, allowed = (distances(call, values, targets) for call in (ours, theirs))
    print(mine, allowed)
    for a, b in zip(mine, allowed, strict=True):
        assert a <= 1.5 * b


@pytest.mark.skipif(INTERPRETED, reason="arithmetic only")
def test_tiles_are_few_equal_and_bounded(monkeypatch):
    monkeypatch.undo()
    assert head.tile_rows(16380, 151936, 2, "cuda") == 4096
    assert head.tile_rows(100, 151936, 2, "cuda") == 128
    assert head.tile_rows(0, 151936, 2, "cuda") == 1
    assert head.tile_rows(16380, 32000, 2, "cuda") == 16384
    for tokens in (1, 5000, 16380, 131072):
        for vocabulary in (384, 32000, 151936, 262144):
            for kind, limit in (("cuda", 5 * 2**28), ("cpu", 2**28)):
                rows = head.tile_rows(tokens, vocabulary, 2, kind)
                assert rows * vocabulary * 2 <= limit
                assert rows >= min(tokens, 128)


def test_a_wrong_gradient_would_be_seen(monkeypatch):
    """The fault put back: the slope of the soft cap forgotten."""
    ops = head.get_ops("cpu")

    def forgetful(logits: Any, targets: Any, transform: LogitTransform) -> Any:
        logits.copy_((transform.softcap * torch.tanh(logits / transform.softcap)).to(logits.dtype))
        return ops.cross_entropy_(logits, targets, LogitTransform())

    class Faulty:
        cross_entropy_ = staticmethod(forgetful)
        add_product_ = staticmethod(ops.add_product_)

    monkeypatch.setattr(head, "get_ops", lambda kind: Faulty)
    log_probs, _, _, *gradients = both(*draw(20, 30), LogitTransform(softcap=1.0))
    assert relative(*log_probs) < 2e-6
    assert min(relative(*pair) for pair in gradients) > 0.1


@pytest.mark.skipif(INTERPRETED, reason="compiles for a device")
@pytest.mark.parametrize("softcap", [False, True])
def test_the_kernel_compiles_for_a_gpu(softcap: bool):
    """Without one: what the interpreter forgives, a name that changes its type in a loop, the compiler does not."""
    triton = pytest.importorskip("triton", reason="triton is not installed (pip install --no-deps triton==3.6.0)")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hf_fsdpturbo.ops.triton_cross_entropy import _cross_entropy_kernel

    pointers = {"logit_ptr": "*bf16", "stride": "i32", "target_ptr": "*i64", "log_prob_ptr": "*fp32"}
    pointers |= {"entropy_ptr": "*fp32", "top1_ptr": "*i8"}
    numbers = dict.fromkeys(("scale", "softcap", "inverse_temperature"), "fp32")
    constants = {"V": 151936, "B": 4096, "SOFTCAP": softcap}
    source = ASTSource(_cross_entropy_kernel, pointers | numbers | dict.fromkeys(constants, "constexpr"), constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "ld.global" in kernel.asm["ptx"]
