"""The logged loss with losses that are not finite, against Transformers' own Trainer: the same numbers, no waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_fsdpturbo import FSDPTurboTrainingArguments
from hf_fsdpturbo.trainer.mixin import FSDPTurboTrainerMixin
from tests.support.tiny_models import tiny_model

BAD = {1: float("nan"), 4: float("inf"), 5: float("-inf"), 8: float("nan")}  # by micro-batch; 2 a step


class Spoiled(Trainer):
    """Some micro-batches' losses are not finite, after their backward."""

    count = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.count += 1
        return loss * BAD.get(self.count - 1, 1.0)


class Watched(FSDPTurboTrainerMixin, Spoiled):
    def floating_point_ops(self, inputs: Any) -> int:
        """Called right after Trainer's ``if``."""
        self.__dict__.setdefault("asked", []).append(self.args.logging_nan_inf_filter)
        return super().floating_point_ops(inputs)


class Flags(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(args.logging_nan_inf_filter)


def logged(trainer_class: Any, arguments_class: Any, folder: Any, every: int, filters: bool) -> tuple[Any, Any, Any]:
    flags = Flags()
    arguments = arguments_class(
        output_dir=str(folder), max_steps=6, logging_steps=every, gradient_accumulation_steps=2, use_cpu=True,
        per_device_train_batch_size=1, report_to="none", save_strategy="no", disable_tqdm=True,
        logging_nan_inf_filter=filters,
    )  # fmt: skip
    ids = torch.arange(12 * 8).reshape(12, 8) % 32
    data = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    trainer = trainer_class(tiny_model("qwen3_moe"), arguments, train_dataset=data, callbacks=[flags])
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return [*losses, trainer.state.log_history[-1]["train_loss"]], flags.seen, trainer


@pytest.mark.parametrize("every", [1, 2, 4])
def test_the_log_is_trainers_and_it_asks_nothing(every, tmp_path):
    expected, _, _ = logged(Spoiled, TrainingArguments, tmp_path / "plain", every, True)
    found, flags, trainer = logged(Watched, FSDPTurboTrainingArguments, tmp_path / "ours", every, True)
    assert found == expected
    assert all(torch.isfinite(torch.tensor(found)))
    assert trainer.asked == [False] * 12
    assert trainer._globalstep_last_logged == 6 // every * every
    assert torch.isfinite(trainer._tr_loss)
    assert flags == [True] * 6


def test_without_the_filter_the_loss_is_logged_as_it_is(tmp_path):
    found, flags, trainer = logged(Watched, FSDPTurboTrainingArguments, tmp_path / "ours", 2, False)
    assert not any(torch.isfinite(torch.tensor(found[:2])))
    assert flags == [False] * 6


def test_the_flag_is_back_when_a_run_fails_in_between(tmp_path):
    class Fails(Watched):
        def floating_point_ops(self, inputs: Any) -> int:
            raise OSError("in between")

    with pytest.raises(OSError, match="in between"):
        logged(Fails, FSDPTurboTrainingArguments, tmp_path, 2, True)
