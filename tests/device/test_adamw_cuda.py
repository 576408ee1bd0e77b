"""Our AdamW on the GPU itself against torch's fused one: float32, bf16, the clip factor, written copies, the norm."""

import copy
import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: the same runs on CPU in tests/unit/test_one_pass.py", allow_module_level=True)

from torch import nn

from hf_fsdpturbo import clip_grad_norm_
from hf_fsdpturbo.ops.table import get_ops
from hf_fsdpturbo.ops.weight_copies import WeightCopies
from hf_fsdpturbo.optim.one_pass import AdamW, in_one_pass

SHAPES = [(1024, 512), (4, 257, 33), (7,), (1,), (0, 8), (3_000_001,)]


def made(dtype: torch.dtype) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    torch.manual_seed(0)
    members = nn.ParameterList(nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in SHAPES)
    decays = {0.1: list(members)[::2], 0.0: list(members)[1::2]}
    groups = [{"params": some, "weight_decay": decay} for decay, some in decays.items()]
    return members, torch.optim.AdamW(groups, lr=1e-2, fused=True)


def draw_gradients(members: nn.ParameterList, step: int) -> None:
    """Gradients as views into one buffer, as FSDP leaves them: most begin in the middle of 16 bytes."""
    generator = torch.Generator("cuda").manual_seed(step)
    sizes = [p.numel() for p in members]
    flat = torch.randn(1 + sum(sizes), device="cuda", generator=generator).to(members[0].dtype)[1:]
    for parameter, part in zip(members, flat.split(sizes), strict=True):
        parameter.grad = part.view(parameter.shape) if step % 2 else part.view(parameter.shape).clone()


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def take_steps(members: nn.ParameterList, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
    """Twenty steps of a changing rate on the gradients of ``draw_gradients``, clipped where a norm is given."""
    for step in range(20):
        draw_gradients(members, step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 + math.cos(step / 5))
        if max_norm is not None and isinstance(optimizer, AdamW):
            norm = get_ops("cuda").square_sum([p.grad for p in members if p.numel()]).sqrt()
            optimizer.gradient_factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        elif max_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(members), max_norm)
        optimizer.step()


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twenty_steps_are_as_near_to_float64_as_torchs_fused(dtype, max_norm):
    """Truth: the same gradients, as they were drawn, in float64. Single elements are luck: 1.5 times, and an ulp."""
    (mine, ours), (other, theirs), (truth, exact) = (made(dtype) for _ in range(3))
    ours = in_one_pass(ours)
    assert isinstance(ours, AdamW)
    take_steps(mine, ours, max_norm)
    take_steps(other, theirs, max_norm)
    truth = nn.ParameterList(nn.Parameter(p.detach().double()) for p in truth)
    decays = {0.1: list(truth)[::2], 0.0: list(truth)[1::2]}
    exact = torch.optim.AdamW([{"params": some, "weight_decay": d} for d, some in decays.items()], lr=1e-2)
    for step in range(20):
        draw_gradients(mine, step)  # in the dtype of the run, then as float64
        for p, q in zip(truth, mine, strict=True):
            p.grad = q.grad.double()
        for group in exact.param_groups:
            group["lr"] = 1e-2 * (1 + math.cos(step / 5))
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(truth), max_norm)
        exact.step()
    ulp = torch.finfo(dtype).eps
    for p, q, r in zip(mine, other, truth, strict=True):
        states = [(ours.state[p][n], theirs.state[q][n], exact.state[r][n]) for n in ("exp_avg", "exp_avg_sq")]
        pairs = [(p, q, r), *states]
        for a, b, c in pairs:
            near, as_near = far(a.detach(), c.detach()), far(b.detach(), c.detach())
            print(tuple(p.shape), f"ours {near:.2e}, torch's {as_near:.2e}")
            assert near <= 1.5 * as_near + ulp
        assert ours.state[p]["step"].item() == theirs.state[q]["step"].item() == 20


def test_states_of_torchs_fused_go_both_ways():
    (whole, uninterrupted), (first, torchs), (second, ours) = (made(torch.float32) for _ in range(3))
    ours = in_one_pass(ours)

    def steps(members, optimizer, numbers):
        for number in numbers:
            draw_gradients(members, number)
            optimizer.step()

    def move(from_members, source, to_members, target):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        for p, q in zip(to_members, from_members, strict=True):
            p.data.copy_(q.data)

    steps(whole, uninterrupted, range(9))
    steps(first, torchs, range(3))
    move(first, torchs, second, ours)
    steps(second, ours, range(3, 6))
    move(second, ours, first, torchs)
    steps(first, torchs, range(6, 9))
    for p, q in zip(first, whole, strict=True):
        assert far(p.detach(), q.detach()) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_torchs(dtype):
    members, _ = made(dtype)
    for step in (0, 1):
        draw_gradients(members, step)
        exact = math.sqrt(sum(p.grad.double().square().sum().item() for p in members))
        assert clip_grad_norm_(members, float("inf")).item() == pytest.approx(exact, rel=1e-5)


def test_the_written_copy_is_the_new_weight_cast():
    weight = nn.Parameter(torch.randn(8, 64, 128, device="cuda"))
    copies, optimizer = WeightCopies(), AdamW([weight], lr=1e-2)
    for _ in range(3):
        copies.get("weight", weight, torch.bfloat16).float().square().sum().backward()
        place = copies.get("weight", weight, torch.bfloat16).data_ptr()
        optimizer.step()
        optimizer.zero_grad()
        kept = copies.get("weight", weight, torch.bfloat16)
        assert kept.data_ptr() == place
        assert torch.equal(kept, weight.detach().to(torch.bfloat16))
