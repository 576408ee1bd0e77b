"""S11 in one process, without ranks: what is noted where, and what each mode does to gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_fsdpturbo.trainer.nonfinite import NonFinite, weights_not_finite

NAN = torch.tensor(float("nan"))


def trainer_of(step: int = 0):
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = SimpleNamespace(global_step=step)
    args = SimpleNamespace(device=torch.device("cpu"), logging_nan_inf_filter=False)
    added = torch.tensor(0.0)
    return SimpleNamespace(model=model.train(), state=state, args=args, last_group_norms=None, _tr_loss=added)


def has_gradients(trainer) -> bool:
    return all(parameter.grad is not None for parameter in trainer.model.parameters())


def logging(trainer, watch: NonFinite) -> None:
    watch.on_step_end(trainer.args, trainer.state, SimpleNamespace(should_log=True))


def test_warn_waits_for_the_logging_step_and_names_the_first(capsys):
    trainer = trainer_of()
    watch = NonFinite(trainer, "warn")
    for step in range(4):
        trainer.state.global_step = step
        for micro_batch in range(2):
            watch.saw_loss(NAN if (step, micro_batch) in ((2, 1), (3, 0)) else torch.tensor(1.0))
        watch.saw_norm(NAN if step >= 2 else torch.tensor(1.0))
        watch.on_step_end(trainer.args, trainer.state, SimpleNamespace(should_log=False))
    assert capsys.readouterr().out == ""
    assert has_gradients(trainer)
    logging(trainer, watch)
    (line,) = capsys.readouterr().out.splitlines()
    assert "step 3: the loss of micro-batch 1 on rank 0 is not finite; the gradient norm" in line
    logging(trainer, watch)
    assert capsys.readouterr().out == "", "said once"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_skip_takes_the_gradients_away(capsys, value):
    trainer = trainer_of(step=4)
    watch = NonFinite(trainer, "skip")
    watch.saw_norm(torch.tensor(1.0))
    assert has_gradients(trainer)
    watch.saw_norm(torch.tensor(value))
    assert not has_gradients(trainer)
    assert "step 5" in capsys.readouterr().out


def test_stop_raises_before_the_step():
    trainer = trainer_of()
    trainer.last_group_norms = {"dense": torch.tensor(1.0), "expert": NAN, "total": NAN}
    with pytest.raises(ValueError, match="step 1: the gradient norm of parameters of kind expert is not finite"):
        NonFinite(trainer, "stop").saw_norm(NAN)


def test_a_finite_run_says_nothing(capsys):
    trainer = trainer_of()
    watch = NonFinite(trainer, "warn")
    watch.saw_loss(torch.tensor(1.0))
    watch.saw_norm(torch.tensor(1.0))
    logging(trainer, watch)
    watch.on_train_end(trainer.args, trainer.state, None)
    assert capsys.readouterr().out == ""


def test_weights_that_are_not_finite_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert weights_not_finite(model) == []
    with torch.no_grad():
        model[1].bias[0] = float("inf")
        model[0].weight[1, 0] = float("nan")
    assert weights_not_finite(model) == ["0.weight", "1.bias"]
