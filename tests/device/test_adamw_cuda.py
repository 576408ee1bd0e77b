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


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_twenty_steps_equal_torchs_fused(dtype, tolerance, max_norm):
    (mine, ours), (other, theirs) = made(dtype), made(dtype)
    ours = in_one_pass(ours)
    assert isinstance(ours, AdamW)
    for step in range(20):
        for members, optimizer in ((mine, ours), (other, theirs)):
            draw_gradients(members, step)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (1 + math.cos(step / 5))
            if max_norm is not None and optimizer is ours:
                norm = get_ops("cuda").square_sum([p.grad for p in members if p.numel()]).sqrt()
                ours.gradient_factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            elif max_norm is not None:
                torch.nn.utils.clip_grad_norm_(list(members), max_norm)
            optimizer.step()
    for p, q in zip(mine, other, strict=True):
        distances = [far(p.detach(), q.detach())]
        distances += [far(ours.state[p][name], theirs.state[q][name]) for name in ("exp_avg", "exp_avg_sq")]
        print(tuple(p.shape), distances)
        assert max(distances) < tolerance
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
