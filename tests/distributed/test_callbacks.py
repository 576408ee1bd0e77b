"""Callbacks of TRL and Transformers on sharded models: right, or refused by name before training (C7, C8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.reference_run import Run, build_trainer, forget_accelerate
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import texts


def until_it_gets_worse(run: Run, turbo: bool, folder: Path) -> tuple[int, float, float]:
    """Early stopping at a rate that spoils the model: last step, best metric, and that of the model it ends with."""
    from transformers import EarlyStoppingCallback

    forget_accelerate()
    trainer = build_trainer(run, turbo, output_dir=str(folder))
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=1))
    trainer.train()
    return trainer.state.global_step, trainer.state.best_metric, trainer.evaluate()["eval_loss"]


def sampled(run: Run) -> list[list[int]]:
    """Each evaluation of a training run is followed by samples; rank 0's sequence is the longer one."""
    from transformers import TrainerCallback

    forget_accelerate()
    trainer = build_trainer(run, True)
    found: list[list[int]] = []

    class Samples(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            new = 6 if args.process_index == 0 else 2
            ids = model.generate(torch.tensor([[5, 9, 12]]), max_new_tokens=new, do_sample=True, eos_token_id=None)
            found.append(list(ids.shape))

    trainer.add_callback(Samples())
    trainer.train()
    return found


def refused(run: Run) -> list[str]:
    """What BEMA and a resize say."""
    from trl import BEMACallback

    forget_accelerate()
    trainer = build_trainer(run, True)
    said = []
    size = trainer.model.get_input_embeddings().weight.shape[0]
    trainer.model.resize_token_embeddings(size)
    with pytest.raises(ValueError, match="resize_token_embeddings") as caught:
        trainer.model.resize_token_embeddings(size + 8)
    said.append(str(caught.value))
    trainer.add_callback(BEMACallback())
    with pytest.raises(ValueError, match="callbacks: BEMACallback") as caught:
        trainer.train()
    said.append(str(caught.value))
    assert trainer.state.global_step == 0
    return said


def all_of_them(stops: Run, samples: Run, folder: Path) -> dict[str, Any]:
    """Rank function."""
    return {
        "stopped": until_it_gets_worse(stops, True, folder),
        "sampled": sampled(samples),
        "refused": refused(samples),
    }


def test_callbacks_are_right_or_refused(tiny, tmp_path):
    """C7 (``refused``: before training, on every rank) and C8."""
    data, held_out = {"text": texts(32, seed=3)}, {"text": texts(8, seed=5)}
    evaluates = {"eval_strategy": "steps", "eval_steps": 1}
    stops = Run(
        tiny("qwen3_moe"),
        data,
        {
            **evaluates,
            "max_steps": 8,
            "save_strategy": "steps",
            "save_steps": 1,
            "learning_rate": 0.05,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
        },
        {"ep_size": 2},
        trainer="plain",
        eval_data=held_out,
        gradients=False,
    )
    samples = Run(
        tiny("qwen3_moe"), data, {**evaluates, "max_steps": 2}, {"ep_size": 2}, eval_data=held_out, gradients=False
    )
    found = run_ranks(all_of_them, 2, stops, samples, tmp_path / "ranks", timeout=120)
    wide = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    alone = Run(stops.model, data, {**stops.args, **wide}, trainer="plain", eval_data=held_out, gradients=False)
    step, best, _ = run_plain(until_it_gets_worse, alone, False, tmp_path / "alone")
    assert 1 < step < 8, "training was not stopped early"
    for rank, seen in enumerate(found):
        assert seen["stopped"][0] == step
        assert seen["stopped"][1] == pytest.approx(best, rel=1e-3)  # the rate makes distances grow
        assert seen["stopped"][2] == pytest.approx(seen["stopped"][1], rel=1e-6), "the best model is the one it has"
        assert seen["sampled"] == [[1, 3 + (6, 2)[rank]]] * 2
        resize, bema = seen["refused"]
        assert "before it is given to the trainer" in resize
        assert "whole copy" in bema
