"""Our AdamW against torch's on CPU: twenty steps, states both ways, the clip factor, written copies, who gets it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdpturbo.ops import weight_copies
from hf_fsdpturbo.ops.weight_copies import WeightCopies
from hf_fsdpturbo.optim.one_pass import AdamW, in_one_pass

BF16 = torch.bfloat16
STATES = ("exp_avg", "exp_avg_sq", "step")


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (30,), (3, 8, 5), (1,), (0, 4)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def groups_of(members: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": members[::2], "weight_decay": 0.1}, {"params": members[1::2], "weight_decay": 0.0}]


def draw_gradients(members: list[nn.Parameter], step: int) -> None:
    """The same for the same step; parameter 1 gets none at every third step, so that counts differ."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(members):
        gradient = torch.randn(parameter.shape, generator=generator) * 10 ** (number - 2)
        parameter.grad = None if number == 1 and step % 3 == 2 else gradient.to(parameter.dtype)


def run(optimizer: torch.optim.Optimizer, steps: range, max_norm: float | None = None) -> None:
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    members = sorted(members, key=lambda p: p.order)
    for step in steps:
        draw_gradients(members, step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 + math.cos(step / 5))
        if max_norm is not None and isinstance(optimizer, AdamW):
            norm = torch.nn.utils.get_total_norm([p.grad for p in members if p.grad is not None])
            optimizer.gradient_factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        elif max_norm is not None:
            torch.nn.utils.clip_grad_norm_(members, max_norm)
        optimizer.step()


def made(kind: type, dtype: torch.dtype = torch.float32, **options: Any) -> torch.optim.Optimizer:
    members = parameters(dtype)
    for number, parameter in enumerate(members):
        parameter.order = number  # type: ignore[attr-defined]
    return kind(groups_of(members), lr=1e-2, **options)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def furthest(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> float:
    """The largest distance of weights and states, all of them."""
    found = [0.0]
    for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(mine["params"], other["params"], strict=True):
            found.append(far(p.detach(), q.detach()))
            assert ours.state[p].keys() == theirs.state[q].keys() == set(STATES)
            found += [far(ours.state[p][name], theirs.state[q][name]) for name in STATES]
    return max(found)


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_twenty_steps_equal_torchs(options, max_norm):
    ours, theirs = made(AdamW), made(torch.optim.AdamW, **options)
    for optimizer in (ours, theirs):
        run(optimizer, range(20), max_norm)
    assert furthest(ours, theirs) < 2e-6


def test_bf16_rounds_as_torchs_fused():
    """Sums in float32 and one rounding on both sides: most results are the same bf16 number."""
    ours, theirs = made(AdamW, BF16), made(torch.optim.AdamW, BF16, fused=True)
    for optimizer in (ours, theirs):
        run(optimizer, range(1))
    equal = [
        (p == q).float().mean().item()
        for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True)
        for p, q in zip(mine["params"], other["params"], strict=True)
        if p.numel()
    ]
    assert min(equal) > 0.99
    assert {state["exp_avg"].dtype for state in ours.state.values()} == {BF16}


@pytest.mark.parametrize("clips", [[], ["twice"], ["never"]])
def test_the_factor_is_used_once(clips, monkeypatch):
    """Right, and with both faults put back."""
    ours, theirs = made(AdamW), made(torch.optim.AdamW)
    if clips == ["twice"]:
        inside = AdamW.step.__wrapped__ if hasattr(AdamW.step, "__wrapped__") else AdamW.step

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and self.gradient_factor is not None:
                        p.grad.mul_(self.gradient_factor)
            return inside(self, closure)

        monkeypatch.setattr(AdamW, "step", step)
    elif clips == ["never"]:
        monkeypatch.setattr(AdamW, "gradient_factor", property(lambda self: None, lambda self, value: None))
    for optimizer in (ours, theirs):
        run(optimizer, range(6), 0.5)
    assert (furthest(ours, theirs) < 2e-6) is (clips == [])


def test_a_step_without_a_new_factor_is_unclipped_and_gradients_stay():
    ours, theirs = made(AdamW), made(torch.optim.AdamW)
    run(ours, range(1), 0.5)
    (member,) = [p for group in ours.param_groups for p in group["params"] if p.order == 0]
    before = member.grad.clone()
    run(theirs, range(1), 0.5)
    assert torch.equal(member.grad, before)
    assert ours.gradient_factor is None
    for optimizer in (ours, theirs):
        run(optimizer, range(1, 3))
    assert furthest(ours, theirs) < 2e-6


@pytest.mark.parametrize("options", [{"fused": True}, {}])
def test_states_go_both_ways(options):
    """Ten steps of one, ten of the other, equal twenty of torch's."""
    whole = made(torch.optim.AdamW, **options)
    run(whole, range(20))
    for first, second in ((AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)):
        a, b = (made(kind, **({} if kind is AdamW else options)) for kind in (first, second))
        run(a, range(10))
        b.load_state_dict(copy.deepcopy(a.state_dict()))
        for mine, other in zip(b.param_groups, a.param_groups, strict=True):
            for p, q in zip(mine["params"], other["params"], strict=True):
                p.data.copy_(q.data)
        run(b, range(10, 20))
        assert furthest(b, whole) < 2e-6


def test_what_is_torchs_own_is_refused_in_ours_and_left_to_torch():
    for name in ("amsgrad", "maximize"):
        ours = made(AdamW)
        ours.param_groups[0][name] = True
        with pytest.raises(ValueError, match=f"{name}=True"):
            run(ours, range(1))
    for options in ({"amsgrad": True}, {"maximize": True}, {"capturable": True}, {"differentiable": True}):
        theirs = made(torch.optim.AdamW, **options)
        assert in_one_pass(theirs) is theirs
        with pytest.raises(ValueError, match=next(iter(options))):
            in_one_pass(theirs, "fsdpturbo")


def test_who_gets_it():
    theirs, sgd = made(torch.optim.AdamW, fused=True, betas=(0.8, 0.99), eps=1e-6), made(torch.optim.SGD)
    assert in_one_pass(theirs) is theirs, "auto on CPU"
    assert in_one_pass(theirs, "torch") is theirs
    assert in_one_pass(sgd) is sgd
    for optimizer, given in ((sgd, False), (theirs, True)):
        with pytest.raises(ValueError, match="optim_implementation='fsdpturbo'"):
            in_one_pass(optimizer, "fsdpturbo", is_given=given)
    ours = in_one_pass(theirs, "fsdpturbo")
    assert type(ours).__name__ == "AdamW"
    assert isinstance(ours, torch.optim.AdamW)
    assert in_one_pass(ours, "fsdpturbo", is_given=True) is ours
    keys = ("lr", "betas", "eps", "weight_decay", "params")
    for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert {key: mine[key] for key in keys} == {key: other[key] for key in keys}
        assert mine["fused"] is False


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 6, 8, generator=generator))
        self.frozen = nn.Parameter(torch.randn(4, 4, generator=generator), requires_grad=False)
        self.copies = WeightCopies()

    def forward(self) -> torch.Tensor:
        total = self.copies.get("frozen", self.frozen, BF16, self.training).float().sum()
        return total + (self.copies.get("weight", self.weight, BF16, self.training).float() ** 2).sum()


def test_copies_are_written_with_the_weight_and_read_by_the_next_forward():
    module, twin = Module(), Module()
    ours, theirs = AdamW([module.weight], lr=0.1), torch.optim.AdamW([twin.weight], lr=0.1)
    expected, place = [], None
    for _ in range(3):
        twin().backward()
        theirs.step()
        theirs.zero_grad()
        expected.append(twin.weight.detach().clone())
        assert twin.copies.nbytes() == 0
    for weight in expected:
        module().backward()
        ours.step()
        ours.zero_grad()
        assert module.copies.nbytes() == module.weight.numel() * 2, "the frozen weight's copy is gone"
        (kept,) = module.copies.current().values()
        assert torch.equal(kept, module.weight.detach().to(BF16))
        assert place in (None, kept.data_ptr())
        place = kept.data_ptr()
        assert module.copies.get("weight", module.weight, BF16, True).data_ptr() == place, "nothing is converted"
        assert far(module.weight.detach(), weight) < 1e-6


def test_a_copy_that_is_not_written_is_dropped(monkeypatch):
    """After an edit a copy is stale. The fault put back, a step that says nothing: the version still tells."""
    module = Module()
    optimizer = AdamW(module.parameters(), lr=0.1)
    module().backward()
    with torch.no_grad():
        module.weight.add_(1)
    assert module.weight not in module.copies.current()
    optimizer.step()
    assert module.copies.nbytes() == 0
    module().backward()
    monkeypatch.setattr(weight_copies, "keep_written", lambda written: None)
    monkeypatch.setattr(weight_copies, "current_copies", dict)
    optimizer.step()
    assert module.copies.nbytes() > 0
    assert module.weight not in module.copies.current(), "its version tells"


def test_another_optimizer_drops_what_ours_wrote():
    module = Module()
    ours, other = AdamW([module.weight], lr=0.1), torch.optim.SGD([module.weight], lr=0.1)
    module().backward()
    ours.step()
    assert module.copies.nbytes() > 0
    other.step()
    assert module.copies.nbytes() == 0


@pytest.mark.parametrize("made", [torch.optim.Adam, torch.optim.AdamW, AdamW])
def test_state_to_be_filled_is_made_without_all_gradients_at_once(made, monkeypatch):
    """Resuming: the same tensors as torch makes, weights and rates left as they are, few gradients at a time."""
    from hf_fsdpturbo.checkpoint import fresh_state

    monkeypatch.setattr(fresh_state, "GRADIENT_BYTES", 100)
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in (10, 10, 10, 60, 5)]
    parameters.append(torch.nn.Parameter(torch.randn(7), requires_grad=False))
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = made([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}], lr=0.5, weight_decay=0.1)
    held = []
    step = optimizer.step

    def counted():
        held.append(sum(4 * p.numel() for p in parameters if p.grad is not None))
        step()

    optimizer.step = counted
    assert fresh_state.make_state(optimizer)
    assert held == [80, 40, 240, 20]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert all(parameter.grad is None for parameter in parameters)
    assert list(optimizer.state) == parameters[:5]
    for parameter in parameters[:5]:
        state = optimizer.state[parameter]
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert state["exp_avg"].shape == parameter.shape
    assert not fresh_state.make_state(optimizer), "it has a state"
    assert not fresh_state.make_state(torch.optim.SGD(parameters, momentum=0.9)), "torch makes it"
