"""Training on images equals one plain process: images on all ranks, one, none, by turns; SFT and DPO, frozen, LoRA."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdpturbo.shipped import RECIPES, root
from tests.models_recipes.run import train_recipe
from tests.support.adapter_runs import as_peft
from tests.support.compare import TOLERANCE, compare, distance
from tests.support.reference_run import Run, build_trainer, forget_accelerate, sharded_and_reference, whole_parameters
from tests.support.spawn import RankError, run_ranks
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.tiny_pictures import picture, picture_rows, save_pictures, save_tiny_vision

EP2 = {"ep_size": 2}
IN_ORDER = {"train_sampling_strategy": "sequential", "max_length": None, "weight_decay": 0.1}
ACCUMULATE = {"gradient_accumulation_steps": 2}
RECOMPUTE = {"gradient_checkpointing": True}
ROW_BY_ROW = {"per_device_train_batch_size": 1}  # losses are of a micro-batch, whose rows stay the same on four ranks
# Two rows a micro-batch, ranks by turns: step by step, micro-batch by micro-batch, rank by rank.
ALL, RANK0, RANK1, NONE = [1, 2, 0, 1], [2, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]
MIXED = [*ALL, *ALL, *NONE, *RANK1, *NONE, *NONE]
TURNS = [*RANK0, *NONE, *RANK1]


def freeze_tower(model: Any) -> None:
    model.model.visual.requires_grad_(False)


def freeze_later(trainer: Any) -> None:
    freeze_tower(trainer.model)


class TowerRate:
    """What docs/images.md shows: the tower at a rate of its own, weight decay as it is."""

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)  # type: ignore[misc]
        tower = set(self.model.model.visual.parameters())  # type: ignore[attr-defined]
        for group in list(optimizer.param_groups):
            mine = [p for p in group["params"] if p in tower]
            group["params"] = [p for p in group["params"] if p not in tower]
            optimizer.add_param_group({**group, "params": mine, "lr": 0.1 * group["lr"]})
        return optimizer


def own_tower_rate(trainer: Any) -> None:
    trainer.__class__ = type("Trainer", (TowerRate, type(trainer)), {})


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
    folder = Path(run.args["output_dir"])
    saved = str(folder / "saved")
    trainer.save_model(saved)
    if dist.get_rank() == 0:  # the reference writes into the same folder
        shutil.copytree(folder, f"{folder}_kept")
    dist.barrier()
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
    "tower_rate": (TURNS, {"lr_scheduler_type": "linear"}, {"before_train": own_tower_rate}),
    "resumed": ([*NONE, *RANK0, *RANK1], {"save_strategy": "steps", "save_steps": 1, **ROW_BY_ROW, **ACCUMULATE}, {}),
}


BF16 = "turns in bf16"  # not equal: judged beside what one process does in bf16


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("images")
    model = save_tiny_vision(folder / "model")
    evaluation = save_pictures(folder / "eval", [1, 0, 2, 0, 1])
    runs = {}
    for name, (numbers, args, more) in {**RUNS, BF16: (TURNS, {"bf16": True}, {})}.items():
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


@pytest.mark.parametrize("run", ["mixed", "turns", "never"])
def test_load_tells_images_from_text(outcome: dict, run: str):
    """Also with recompute; a step without images has no load of theirs."""
    record, reference, _ = outcome[run]
    lines = [log for log in record.log_history if "image_token_share" in log]
    assert len(lines) == len(reference.extra["images"]) == 3
    for line, (share, worst) in zip(lines, reference.extra["images"], strict=True):
        assert line["image_token_share"] == pytest.approx(share, rel=1e-12)
        assert line.get("experts/load_max_over_mean_images") == (worst if worst is None else pytest.approx(worst))
        assert ("experts/load_max_over_mean_text" in line) == (worst is not None)
    assert any(share > 0 for share, _ in reference.extra["images"]) == (run != "never")


def test_in_bf16_as_near_to_float32_as_one_process(outcome: dict):
    """Each gradient of the first step, where rank 1 has no images, and the losses; autocast is the yardstick."""
    record, autocast, _ = outcome[BF16]
    _, truth, _ = outcome["turns"]
    assert record.losses == pytest.approx(truth.losses, rel=4e-3)
    assert record.losses != truth.losses
    for name, exact in truth.gradients[0].items():
        mine, theirs = (distance(each.gradients[0][name], exact) for each in (record, autocast))
        assert mine < max(2 * theirs, 0.05), (name, mine, theirs)


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


def resume_elsewhere(run: Run, step: int) -> dict[str, Any]:
    """Rank function: four ranks go on from a checkpoint of two, which took twice as many micro-batches a step."""
    folder = Path(run.args["output_dir"])
    args = {**run.args, "output_dir": f"{folder}_at_{step}"}
    trainer = build_trainer(replace(run, args=args, gradients=False), turbo=True)
    trainer.train(resume_from_checkpoint=f"{folder}_kept/checkpoint-{step}")
    return whole_parameters(trainer.model)


@pytest.mark.parametrize(
    ("turbo", "step"), [({"ep_size": 4}, 2), ({"ep_size": 2, "dist_config": {"efsdp_size": 2}}, 1)]
)
def test_resumed_at_another_layout(outcome: dict, turbo: dict, step: int):
    """The first checkpoint knows no moments of the tower, the second does; images come after both."""
    record, _, _ = outcome["resumed"]
    folder = Path(record.extra["after"]["saved"]).parent
    args = {**IN_ORDER, **ROW_BY_ROW, "output_dir": str(folder)}
    run = Run(str(folder.parent / "model"), str(folder.parent / "resumed"), args, turbo, with_images=True)
    weights = run_ranks(resume_elsewhere, 4, run, step, timeout=60)[0]
    off = {name: distance(tensor, record.weights[name]) for name, tensor in weights.items()}
    worst = max(off, key=lambda name: off[name])
    print(f"worst {worst}: {off[worst]:.1e}")
    assert off[worst] < TOLERANCE, worst


def recipe_of_pictures(model: str, folder: str) -> list[float]:
    """Rank function: two steps of the shipped recipe, by its own command, on a folder of pictures."""
    import tests.support.tiny_pictures  # noqa: F401  (registers the processor)

    words = ["--config", str(root() / RECIPES / "sft_vlm.yaml"), "--model_name_or_path", model, "--ep_size", "2"]
    words += ["--dataset_name", folder, "--output_dir", f"{model}_out", "--max_steps", "2", "--use_cpu", "true"]
    words += ["--gradient_accumulation_steps", "1", "--logging_steps", "1", "--save_strategy", "no"]
    return train_recipe(words, "sft")


def test_recipe_trains_on_a_folder_of_pictures(tmp_path: Path):
    """Of its own, since a recipe ends its ranks' process group."""
    (tmp_path / "rows").mkdir()
    lines = []
    for row in range(8):
        picture(row).save(tmp_path / "rows" / f"{row}.png")
        talk = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a picture of noise"}]
        lines.append(json.dumps({"file_name": f"{row}.png", "messages": talk}))
    (tmp_path / "rows" / "metadata.jsonl").write_text("\n".join(lines))
    model = save_tiny_vision(tmp_path / "model")
    losses = run_ranks(recipe_of_pictures, 2, model, str(tmp_path / "rows"), timeout=90)[0]
    print(losses)
    assert len(losses) == 2
    assert losses[0] == pytest.approx(math.log(VOCAB_SIZE + 8), rel=0.1)


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
    named = "rank 1 left training with ValueError: train_dataset: row 2, column 'images', image 0: file"
    assert named in str(raised.value)
    assert "cut.png cannot be read (image file is truncated)" in str(raised.value)
    assert "train_dataset: row 2, column 'images', image 0: file" in str(raised.value)
    assert "missing.png does not exist" in str(raised.value)
