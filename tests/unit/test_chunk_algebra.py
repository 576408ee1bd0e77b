"""The small inverse of a chunk and unit vectors: values, gradients and rounding, against torch's own."""

from __future__ import annotations

import pytest
import torch

from hf_fsdpturbo.kernels.chunk_algebra import L2NORM_EPS, solved_by_inverse, unit_vectors
from hf_fsdpturbo.kernels.state_walk import minus_product


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


def by_substitution(system: torch.Tensor, *right: torch.Tensor) -> tuple[torch.Tensor, ...]:
    solved = torch.linalg.solve_triangular(system, torch.cat(right, -1), upper=False, unitriangular=True)
    return solved.split([x.shape[-1] for x in right], -1)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 5), (1, 2, 1, 3, 8)])
def test_solutions_and_gradients(shape):
    """What is on and above the diagonal of the system is not read, and gets no gradient."""
    *batch, size = shape
    leaves = [draw(*batch, size, n, seed=n).requires_grad_() for n in (size, 4, 3)]
    probes = [draw(*batch, size, n, seed=9) for n in (4, 3)]
    results = []
    for function in (solved_by_inverse, by_substitution):
        found = function(*leaves)
        loss = sum((x * probe).sum() for x, probe in zip(found, probes, strict=True))
        results.append([*found, *torch.autograd.grad(loss, leaves)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    assert results[0][2].triu().abs().max() == 0
    assert all(x.is_contiguous() for x in results[0][:2])


@pytest.mark.parametrize("alike", [False, True], ids=["random keys", "one key again and again"])
@pytest.mark.parametrize("decay", [0.0, 0.01, 1.0])
def test_rounding_is_that_of_substitution(alike, decay):
    """In float32, chunks of 64 and keys of unit length, writes of up to 1: the largest systems that the rule makes."""
    key = draw(8, 1 if alike else 64, 128).expand(8, 64, 128)
    key = key / key.norm(dim=-1, keepdim=True)
    steps = torch.arange(64.0, dtype=torch.float64)
    system = (key @ key.mT) * torch.exp(-decay * (steps[:, None] - steps).clamp_min(0)) * 0.99
    right = draw(8, 64, 128, seed=1), draw(8, 64, 128, seed=2)
    exact = by_substitution(system, *right)
    narrow = [x.float() for x in (system, *right)]
    found = solved_by_inverse(*narrow), by_substitution(*narrow)
    ours, substituted = (max(relative(a, b) for a, b in zip(each, exact, strict=True)) for each in found)
    assert ours < 3 * substituted
    assert ours < 1e-5


@pytest.mark.parametrize("scale", [1.0, 0.088])
def test_unit_vectors(scale):
    x, probe = draw(3, 5, 8).requires_grad_(), draw(3, 5, 8, seed=1)
    with torch.no_grad():
        x[0, 0] = 0  # what is padded
        x[0, 1] *= 1e-3  # eps is felt
    expected = scale * x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)
    found = unit_vectors(x, scale)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad((y * probe).sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
    assert gradients[0].isfinite().all()


def test_minus_product_does_not_read_what_was_there():
    left, right = draw(2, 3, 4), draw(2, 4, 5)
    torch.testing.assert_close(minus_product(left, right), -(left @ right))


@pytest.mark.parametrize("function", [lambda x: unit_vectors(x), lambda x: solved_by_inverse(x, x, x)[0]])
def test_a_gradient_of_a_gradient_is_refused(function):
    x = draw(1, 4, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
