"""Training on images equals one plain process: images on all ranks, one, none, by turns; SFT and DPO, frozen, LoRA."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapter_runs import as_peft
from tests.support.compare import TOLERANCE, compare, distance
from tests.support.reference_run import Run, build_trainer, forget_accelerate, sharded_and_reference, whole_parameters
from tests.support.spawn import RankError, run_ranks
from tests.support.tiny_pictures import picture, picture_rows, save_pictures, save_tiny_vision

EP2 = {"ep_size": 2}
IN_ORDER = {"train_sampling_strategy": "sequential", "max_length": None, "weight_decay": 0.1}
ACCUMULATE = {"gradient_accumulation_steps": 2}
RECOMPUTE = {"gradient_checkpointing": True}
# Two rows a micro-batch, ranks by turns: step by step, micro-batch by micro-batch, rank by rank.
ALL, RANK0, RANK1, NONE = [1, 2, 0, 1], [2, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]
MIXED = [*ALL, *ALL, *NONE, *RANK1, *NONE, *NONE]
TURNS = [*RANK0, *NONE, *RANK1]


def freeze_tower(model: Any) -> None:
    model.model.visual.requires_grad_(False)


def freeze_later(trainer: Any) -> None:
    freeze_tower(trainer.model)


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=r".*language_model.*\.(q_proj|v_proj)",
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )


def save_and_resume(trainer: Any, run: Run) -> dict[str, Any]:
    """On ranks: save, then train once more from the first checkpoint, which knows no tower; nothing in one process."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return {}
    saved = str(Path(run.args["output_dir"]) / "saved")
    trainer.save_model(saved)
    forget_accelerate()
    other = build_trainer(replace(run, gradients=False), turbo=True)
    other.train(resume_from_checkpoint=str(Path(run.args["output_dir"]) / "checkpoint-1"))
    return {"weights": whole_parameters(other.model), "saved": saved}


# name -> (images of each row, training arguments, the run's other fields)
RUNS: dict[str, tuple[list[int], dict, dict]] = {
    "mixed": (MIXED, {**ACCUMULATE, "eval_strategy": "steps", "eval_steps": 3}, {}),
    "turns": (TURNS, RECOMPUTE, {}),
    "never": (NONE * 3, {}, {}),
    "frozen": ([*RANK0, *NONE, *RANK0], {}, {"as_object": True, "prepare": freeze_tower}),
    "lora": (TURNS, {}, {}),
    "dpo": (TURNS, {}, {"trainer": "dpo"}),
    "frozen_later": (TURNS, {}, {"before_train": freeze_later}),
    "resumed": ([*NONE, *RANK0, *RANK1], {"save_strategy": "steps", "save_steps": 1}, {}),
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("images")
    model = save_tiny_vision(folder / "model")
    evaluation = save_pictures(folder / "eval", [1, 0, 2, 0, 1])
    runs = {}
    for name, (numbers, args, more) in RUNS.items():
        data = save_pictures(folder / name, numbers, preferences=name == "dpo")
        more = {**more, **({"eval_data": evaluation} if "eval_steps" in args else {})}
        more |= {"trainer_kwargs": {"peft_config": lora()}} if name == "lora" else {}
        args = {**IN_ORDER, **args, "output_dir": str(folder / f"{name}_output")}
        runs[name] = run = Run(model, data, args, EP2, with_images=True, **more)
        if name == "resumed":
            runs[name] = replace(run, after_train=partial(save_and_resume, run=run))
    try:
        return sharded_and_reference(runs, 2, timeout=150)
    except RankError as error:
        pytest.fail(str(error))


@pytest.mark.parametrize("run", RUNS)
def test_equals_one_process(outcome: dict, run: str):
    record, reference, _ = outcome[run]
    comparison = compare(as_peft(record), reference)
    print(comparison.report)
    assert comparison, comparison.report
    for rank in record.extra["ranks"]:
        assert rank.digest == record.digest, "replicas have drifted apart"


def test_evaluation_counts_each_sample_once(outcome: dict):
    """Five rows on two ranks of two: the last batch mixes a real sample and a repeat, both with images."""
    record, reference, _ = outcome["mixed"]
    mine, theirs = (next(log for log in each.log_history if "eval_loss" in log) for each in (record, reference))
    assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)


def test_saved_with_its_processor_and_resumed(outcome: dict):
    from transformers import AutoProcessor, Qwen3VLMoeForConditionalGeneration

    record, _, _ = outcome["resumed"]
    again = record.extra["after"]["weights"]
    off = {name: distance(tensor, record.weights[name]) for name, tensor in again.items()}
    assert max(off.values()) < TOLERANCE, max(off, key=lambda name: off[name])
    saved = record.extra["after"]["saved"]
    plain = dict(Qwen3VLMoeForConditionalGeneration.from_pretrained(saved, dtype=torch.float32).named_parameters())
    assert all(torch.equal(plain[name], tensor) for name, tensor in record.weights.items())
    processor = AutoProcessor.from_pretrained(saved)
    assert type(processor).__name__ == "PictureProcessor"
    assert processor.chat_template


def bad_pictures(model: str, folder: str) -> None:
    """Rank function: a file that is missing is named at set-up; one that breaks off, when rank 1 reads it."""
    from datasets import Dataset, Image, List

    from hf_fsdpturbo import watcher

    watcher.POLL, watcher.SITS, watcher.GOODBYE = 0.1, 1.0, 2.0
    for bad in ("missing.png", "cut.png"):
        rows = picture_rows([1, 0, 1, 0])
        rows["images"] = [[f"{folder}/good.png"], [], [f"{folder}/{bad}"], []]
        data = Dataset.from_dict(rows).cast_column("images", List(Image()))
        run = Run(model, data, {**IN_ORDER, "max_steps": 1}, EP2, with_images=True)
        forget_accelerate()
        try:
            build_trainer(run, turbo=True).train()
        except ValueError as error:
            print(error, flush=True)


def test_bad_pictures_are_named_on_every_rank(tmp_path: Path):
    picture(0).resize((64, 64)).save(tmp_path / "good.png")
    content = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    model = save_tiny_vision(tmp_path / "model")
    with pytest.raises(RankError) as raised:
        run_ranks(bad_pictures, 2, model, str(tmp_path), timeout=90)
    print(raised.value)
    assert raised.value.rank == 0
    assert "rank 1 left training with ValueError: column 'images': file" in str(raised.value)
    assert "cut.png cannot be read (image file is truncated)" in str(raised.value)
    assert "train_dataset: row 2, column 'images', image 0: file" in str(raised.value)
    assert "missing.png does not exist" in str(raised.value)
