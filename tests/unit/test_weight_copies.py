"""Copies of weights in the compute dtype: made once a step, never stale, gone before the optimizer needs the room."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_fsdpturbo.ops import weight_copies
from hf_fsdpturbo.ops.weight_copies import WeightCopies

BF16 = torch.bfloat16


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 6, 8, generator=generator))
        self.copies = WeightCopies()

    def get(self) -> torch.Tensor:
        return self.copies.get("weight", self.weight, BF16, self.training)

    def is_fresh(self) -> bool:
        return torch.equal(self.get(), self.weight.detach().to(BF16))


def step(module: Module, optimizer: torch.optim.Optimizer) -> None:
    module.get().float().sum().backward()
    optimizer.step()


def test_one_copy_serves_the_micro_batches_of_a_step_and_gradients_are_those_of_a_cast():
    module, twin = Module(), Module()
    rows = torch.randn(3, 4, 6, 8).to(BF16)
    places = set()
    for row in rows:
        weight = module.get()
        places.add(weight.data_ptr())
        (weight * row).sum().backward()
        (twin.weight.to(BF16) * row).sum().backward()
    assert len(places) == 1
    assert module.weight.grad.dtype == torch.float32
    assert torch.equal(module.weight.grad, twin.weight.grad)
    assert module.copies.nbytes() == module.weight.numel() * 2


def test_a_gradient_is_divided_in_the_weights_dtype():
    module, twin = Module(), Module()
    row = torch.randn(4, 6, 8).to(BF16)
    (module.copies.get("weight", module.weight, BF16, divisor=3) * row).sum().backward()
    (twin.weight.to(BF16) * row).sum().backward()
    assert module.weight.grad.dtype == torch.float32
    assert torch.equal(module.weight.grad, twin.weight.grad / 3)
    assert not torch.equal(module.weight.grad, (twin.weight.grad.to(BF16) / 3).float()), "not rounded to bf16"


def test_a_copy_may_be_used_and_not_kept():
    module = Module()
    assert torch.equal(module.copies.get("weight", module.weight, BF16, keep=False), module.weight.to(BF16))
    assert module.copies.nbytes() == 0
    kept = module.copies.get("weight", module.weight, BF16)
    assert module.copies.get("weight", module.weight, BF16, keep=False).data_ptr() == kept.data_ptr()


def test_a_weight_in_the_dtype_is_itself_and_a_tensor_of_the_call_is_not_kept():
    module = Module()
    assert module.copies.get("weight", module.weight, torch.float32) is module.weight
    adapted = module.weight + 1
    converted = module.copies.get("weight", adapted, BF16)
    assert module.copies.nbytes() == 0
    converted.sum().backward()
    assert module.weight.grad is not None


def edit(module: Module) -> None:
    with torch.no_grad():
        module.weight.add_(1)


def load(module: Module) -> None:
    module.load_state_dict({"weight": torch.ones_like(module.weight)})


def assign(module: Module) -> None:
    module.load_state_dict({"weight": torch.ones_like(module.weight)}, assign=True)


def put_storage(module: Module) -> None:
    module.weight.data = torch.ones_like(module.weight)


def average_for_evaluation(module: Module) -> None:
    module.weight.data.mul_(0.5)
    module.eval()


def step_with(**kwargs):
    def change(module: Module) -> None:
        step(module, torch.optim.AdamW(module.parameters(), lr=0.5, **kwargs))

    return change


def step_with_own_kernel(module: Module) -> None:
    class Own(torch.optim.Optimizer):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(1)

    step(module, Own(module.parameters(), {"lr": 1.0}))


CHANGES = {
    "edit": edit,
    "load": load,
    "assign": assign,
    "storage": put_storage,
    "averaged": average_for_evaluation,
    "fused": step_with(fused=True),
    "foreach": step_with(foreach=True),
    "loop": step_with(foreach=False),
    "own kernel": step_with_own_kernel,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_no_copy_is_stale(change):
    module = Module()
    assert module.is_fresh()
    before = module.weight.detach().clone()
    change(module)
    assert not torch.equal(module.weight, before)
    assert module.is_fresh()


def test_versions_alone_would_be_stale(monkeypatch):
    """The fault: without the optimizer's hooks nothing tells of a fused step, and old weights go on training."""
    monkeypatch.setattr(WeightCopies, "forget", lambda self: None)
    module = Module()
    module.get()
    version = module.weight._version
    step(module, torch.optim.AdamW(module.parameters(), lr=0.5, fused=True))
    if module.weight._version != version:
        pytest.skip("this torch counts fused steps")
    assert not module.is_fresh()


def test_copies_are_gone_while_the_optimizer_works_and_after():
    module = Module()
    seen = []

    class Watching(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(module.copies.nbytes())
            module.get()  # as a closure would
            return super().step(closure)

    optimizer = Watching(module.parameters(), lr=0.1)
    step(module, optimizer)
    assert seen == [0]
    assert module.copies.nbytes() == 0
    assert module.is_fresh()


def test_a_copy_made_in_inference_mode_serves_training():
    module = Module()
    with torch.inference_mode():
        module.get()
    (module.get() ** 2).sum().backward()
    assert module.weight.grad is not None


def test_a_graph_keeps_the_weights_it_saw():
    module = Module()
    seen = module.get()
    loss = (seen * seen).sum()
    expected = 2 * module.weight.detach().to(BF16)
    edit(module)
    loss.backward()
    assert torch.equal(module.weight.grad, expected.float())


def test_copying_and_pickling_leave_copies_out():
    module = Module()
    module.get()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.copies.nbytes() == 0
        edit(twin)
        assert twin.is_fresh()
        step(twin, torch.optim.AdamW(twin.parameters(), lr=0.5, fused=True))
        assert twin.copies.nbytes() == 0, "its copies are dropped like others"
    assert module.copies in weight_copies._living
