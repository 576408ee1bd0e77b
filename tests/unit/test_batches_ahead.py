"""Batches fetched before a log line waits: the same in the same steps, none too many, errors where they belong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_fsdpturbo import FSDPTurboTrainingArguments
from hf_fsdpturbo.trainer.mixin import FSDPTurboTrainerMixin
from hf_fsdpturbo.trainer.nonfinite import NonFinite
from tests.support.tiny_models import tiny_model

ROWS = 11  # with 2 a batch: the last one is short


class Collated:
    """Collates, and counts how often."""

    def __init__(self, bad: int | None = None) -> None:
        self.count, self.bad = 0, bad

    def __call__(self, rows: Any) -> Any:
        self.count += 1
        if self.count - 1 == self.bad:
            raise ValueError("a bad row")
        return default_data_collator(rows)


class Seen(Trainer):
    """Notes what each micro-batch was, whether accelerate took it for the last one, and what had been collated."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        last = self.accelerator.gradient_state.end_of_dataloader
        found = self.__dict__.setdefault("seen", [])
        found.append((inputs["input_ids"][:, 0].tolist(), last, self.accelerator.sync_gradients))
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.setdefault("collated", []).append(self.data_collator.count)
        super().log(*args, **kwargs)


class Ours(FSDPTurboTrainerMixin, Seen):
    pass


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(rows())


def rows() -> list[dict[str, list[int]]]:
    return [{"input_ids": [i, *range(5)], "labels": [i, *range(5)]} for i in range(ROWS)]


def run(trainer_class: Any, folder: Any, data: Any, bad: int | None = None, on_cpu: bool = False, **given: Any) -> Any:
    arguments_class = FSDPTurboTrainingArguments if trainer_class is Ours else TrainingArguments
    arguments = arguments_class(
        **{
            "output_dir": str(folder), "logging_steps": 1, "use_cpu": True, "per_device_train_batch_size": 2,
            "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
            "num_train_epochs": 2, **given,
        }
    )  # fmt: skip
    collator = Collated(bad)
    trainer = trainer_class(tiny_model("qwen3_moe"), arguments, train_dataset=data, data_collator=collator)
    if trainer_class is Ours and not on_cpu:  # the tests' device is one, where nothing is fetched ahead
        trainer._ahead.accelerates = True
    if bad is None:
        trainer.train()
    return trainer


CASES = {
    "each": {},
    "accumulated": {"gradient_accumulation_steps": 4},
    "few lines": {"logging_steps": 3, "gradient_accumulation_steps": 2},
    "some steps": {"max_steps": 7},
    "saves": {"save_strategy": "steps", "save_steps": 2, "save_only_model": True},
}


@pytest.mark.parametrize("stream", [False, True], ids=["rows", "stream"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_batches_in_the_same_steps(case, stream, tmp_path):
    given = {"max_steps": 9, **CASES[case]} if stream else CASES[case]
    data = Stream() if stream else Dataset.from_list(rows())
    plain, ours = (run(kind, tmp_path / kind.__name__, data, **given) for kind in (Seen, Ours))
    assert ours.seen == plain.seen
    losses = [[line.get("loss") for line in trainer.state.log_history] for trainer in (ours, plain)]
    assert losses[0] == losses[1]
    assert ours.data_collator.count == plain.data_collator.count, "none is fetched that plain does not fetch"
    if case in ("each", "some steps"):
        assert sum(a > b for a, b in zip(ours.collated, plain.collated, strict=True)) >= 4, "most were fetched ahead"


def test_they_are_fetched_before_anything_waits(tmp_path, monkeypatch):
    """What is said of losses that are not finite is read from the device at the same step's end."""
    found, counts = NonFinite._found, []

    def noted(self: Any) -> Any:
        counts.append(self.trainer.data_collator.count)
        return found(self)

    monkeypatch.setattr(NonFinite, "_found", noted)
    ours = run(Ours, tmp_path, Dataset.from_list(rows()), num_train_epochs=1)
    assert counts[: len(ours.collated)] == ours.collated, "as many as at the log line"


def test_a_step_that_saves_fetches_nothing(tmp_path):
    """The random state in its checkpoint is the one that plain would write."""
    given = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True, "max_steps": 4}
    plain, ours = (run(kind, tmp_path / kind.__name__, Dataset.from_list(rows()), **given) for kind in (Seen, Ours))
    assert ours.collated == plain.collated


def test_an_error_is_raised_where_the_batch_is_asked_for(tmp_path):
    """Not in front of the log line of the step before."""
    found = {}
    for kind in (Seen, Ours):
        trainer = run(kind, tmp_path / kind.__name__, Dataset.from_list(rows()), bad=3)
        with pytest.raises(ValueError, match="a bad row"):
            trainer.train()
        found[kind] = [line["loss"] for line in trainer.state.log_history], trainer.seen
    assert found[Ours] == found[Seen]
    assert len(found[Ours][0]) == 2  # accelerate looks one batch ahead


def test_on_a_cpu_nothing_is_fetched_ahead(tmp_path):
    ours = run(Ours, tmp_path / "ours", Dataset.from_list(rows()), on_cpu=True)
    assert ours.collated == run(Seen, tmp_path / "plain", Dataset.from_list(rows())).collated
