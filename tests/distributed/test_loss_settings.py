"""Settings of Transformers that change the loss or how it is counted: equal to one process, sharded and cut or not."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace

import pytest
import torch

from hf_fsdpturbo.shards import local_tensor
from tests.support.compare import compare
from tests.support.records import DEFAULT_ARGS
from tests.support.reference_run import Run, build_trainer, forget_accelerate, run_turbo, sharded_and_reference
from tests.support.spawn import run_plain, run_ranks
from tests.support.tiny_models import VOCAB_SIZE, texts

SMOOTHED = {"label_smoothing_factor": 0.2}
OWN_TOKENS = {"average_tokens_across_devices": False}
CP2 = {"cp_size": 2}


@pytest.mark.parametrize("turbo", [{"ep_size": 2}, CP2], ids=["ep2", "cp2"])
def test_training_equals_one_process(tiny, turbo):
    """Trainer's own label smoother shifts labels by the model's class name, which FSDP changes."""
    run = Run(tiny("qwen3_moe"), {"text": texts(16, seed=3)}, turbo=turbo)
    runs = {"smoothed plain": replace(run, args=SMOOTHED, trainer="plain")}
    if turbo is CP2:  # elsewhere "own tokens" means another loss on each rank, on purpose
        runs |= {f"own tokens {kind}": replace(run, args=OWN_TOKENS, trainer=kind) for kind in ("plain", "sft")}
    cp_size = turbo.get("cp_size", 1)
    for name, (record, reference, _) in sharded_and_reference(runs, 2, cp_size=cp_size, timeout=150).items():
        comparison = compare(record, reference)
        assert comparison, f"{name}: {comparison.report}"
        assert math.isclose(record.losses[0], math.log(VOCAB_SIZE), abs_tol=0.5), name


# Evaluation with an uneven last batch.


def count_tokens(prediction):
    return {"samples": len(prediction.label_ids), "tokens": int((prediction.label_ids != -100).sum())}


def best_token(logits, labels):
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def evaluate_twice(runs, turbo):
    """Rank function: two evaluations of each trainer; what the first leaves behind must not change the second."""
    found = {}
    for name, run in runs.items():
        forget_accelerate()
        trainer = build_trainer(run, turbo)
        found[name] = [trainer.evaluate(), trainer.evaluate()]
    return found


def classifier(kind, path):
    """A head that is not in the checkpoint, drawn from a seed."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    torch.manual_seed(3)
    if kind == "tokens":
        model = AutoModelForTokenClassification.from_pretrained(path, num_labels=3, dtype=torch.float32)
        model.dropout = torch.nn.Identity()  # its draws would be others on each rank
        return model
    problem = {"problem_type": "multi_label_classification"} if kind == "multi-label" else {}
    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=3, dtype=torch.float32, **problem)


def classify(kind, path, turbo, ranks, accumulation=1):
    """Losses, norms and ``eval_loss`` of a classifier, whose loss takes no ``num_items_in_batch``; 5 samples held out.

    Args:
        kind: "labels", "multi-label" or "tokens" (one label a token: ranks have different numbers of them).
        ranks: data ranks, or what stands for them in one process: its batches are as large as all of theirs.
    """
    import transformers
    from datasets import Dataset

    import hf_fsdpturbo

    forget_accelerate()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    rows = [tokenizer(text, truncation=True, max_length=32) for text in texts(21, seed=4, longest=60)]
    for index, row in enumerate(rows):
        label = [index % 3, [float(index % 3 == 0), 1.0, 0.0], [n % 3 for n in range(len(row["input_ids"]))]]
        row["labels"] = label[("labels", "multi-label", "tokens").index(kind)]
    data = Dataset.from_list([{name: row[name] for name in ("input_ids", "attention_mask", "labels")} for row in rows])
    collator = transformers.DataCollatorForTokenClassification if kind == "tokens" else None
    size = 2 if turbo is not None else 2 * ranks
    arguments = {**DEFAULT_ARGS, "per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    arguments |= {"output_dir": tempfile.mkdtemp(), "max_steps": 2, "gradient_accumulation_steps": accumulation}
    trainer_class, config = transformers.Trainer, transformers.TrainingArguments
    if turbo is not None:
        trainer_class, config = hf_fsdpturbo.FSDPTurboTrainer, hf_fsdpturbo.FSDPTurboTrainingArguments
    trainer = trainer_class(
        classifier(kind, path),
        config(**arguments, **(turbo or {})),
        train_dataset=data.select(range(16)),
        eval_dataset=data.select(range(16, 21)),
        processing_class=tokenizer,
        data_collator=collator and collator(tokenizer),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    logs = trainer.state.log_history
    numbers = [log[name] for log in logs for name in ("loss", "grad_norm") if name in log]
    return [before, *numbers, trainer.evaluate()["eval_loss"]]


CLASSIFIERS = {"labels": ("labels", 1), "labels, 2 batches a step": ("labels", 2), "multi-label": ("multi-label", 1)}
CLASSIFIERS["tokens"] = ("tokens", 1)


def evaluate_and_classify(runs, path, turbo, ranks):
    """Rank function: both, in one spawn."""
    found = {name: classify(kind, path, turbo, ranks, steps) for name, (kind, steps) in CLASSIFIERS.items()}
    return evaluate_twice(runs, turbo is not None), found


METRICS = {"compute_metrics": count_tokens, "preprocess_logits_for_metrics": best_token}


@pytest.mark.parametrize(
    ("world", "turbo"), [(2, {"ep_size": 2}), (4, {"cp_size": 2, "ep_size": 2})], ids=["ep2", "cp2 ep2"]
)
def test_evaluation_loss_equals_one_process(tiny, world, turbo):
    """S5, S6: tokens of all ranks weigh alike, as in one process with batches as large as those of all ranks together.

    TRL's own evaluation takes the mean of the ranks' means, which changes with their number.
    """
    data_ranks = world // turbo.get("cp_size", 1)
    # "mixin": README's class, five lines in front of Transformers' Trainer. "own loop": behind it, a trainer that has
    # an evaluation loop of its own.
    without_aux = {"router_aux_loss_coef": 0.0}  # TRL adds it, and it is a statistic of one batch
    kinds = [(kind, data_ranks, {}) for kind in ("plain", "mixin", "own loop")] + [("sft", data_ranks, without_aux)]
    runs, plain = {}, {}
    for kind, times, args in kinds:
        for samples, size, metrics in ((5, 1, False), (5, 2, True), (7, 3, True), (7, 2, False)):
            run = Run(
                tiny("qwen3_moe"),
                {"text": texts(8, seed=1)},
                args={"per_device_eval_batch_size": size, **args},
                turbo={**turbo, "fused_linear_cross_entropy": "on"} if kind == "sft" else turbo,
                trainer=kind,
                eval_data={"text": texts(samples, seed=2)},
                trainer_kwargs=METRICS if metrics else {},
            )
            name = f"{kind}, {samples} samples by {size}{', metrics' if metrics else ''}"
            runs[name] = run
            plain[name] = replace(run, args={**run.args, "per_device_eval_batch_size": size * times})
    # samples, or bins of samples, follow each other in one row
    for layout, args in (("padding_free", {"max_length": None}), ("eval_packing", {})):
        run = replace(runs["sft, 5 samples by 2, metrics"], trainer_kwargs={})
        args = {**run.args, **args, layout: True}
        runs[f"sft {layout}"] = replace(run, args=args)
        wide = {**args, "per_device_eval_batch_size": 2 * data_ranks}
        plain[f"sft {layout}"] = replace(run, args=wide)
    path = tiny("qwen3_moe")
    expected, alone = run_plain(evaluate_and_classify, plain, path, None, data_ranks, timeout=100)
    for found, classified in run_ranks(evaluate_and_classify, world, runs, path, turbo, data_ranks, timeout=150):
        for name, numbers in classified.items():  # S6
            assert numbers == pytest.approx(alone[name], rel=1e-5), name
            assert abs(numbers[0] - numbers[-1]) > 1e-3, f"{name}: nothing was trained"
        for name, both in found.items():
            for mine, theirs in zip(both, expected[name], strict=True):
                assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5), name
                for metric in ("eval_samples", "eval_tokens"):
                    assert mine.get(metric) == theirs.get(metric), name


# Streams.


def evaluate_a_stream(run, turbo=False):
    """For one plain process: the value of all five samples."""
    trainer = build_trainer(run, turbo)
    return trainer.evaluate(trainer.eval_dataset.to_iterable_dataset(num_shards=2))["eval_loss"]


def train_on_a_stream(run, folder):
    """Rank function: five samples in two files for two data ranks.

    Returns:
        ``eval_loss``, batches seen, steps at which an epoch ended, whether a run stopped in its second epoch and
        resumed equals the run that was not stopped.
    """
    from transformers import TrainerCallback

    forget_accelerate()
    trainer = build_trainer(run, True, output_dir=folder / "whole")
    stream = trainer.eval_dataset.to_iterable_dataset(num_shards=2)
    evaluated = trainer.evaluate(stream)
    batches = [batch["input_ids"].tolist() for batch in trainer.get_eval_dataloader(stream)]
    trainer.train_dataset = stream
    ends: list[int] = []

    class Epochs(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            ends.append(state.global_step)

    trainer.add_callback(Epochs())
    trainer.train()
    resumed = build_trainer(run, True, output_dir=folder / "resumed")
    resumed.train_dataset = stream
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-4"))
    weights = dict(trainer.model.named_parameters())
    equal = all(torch.equal(local_tensor(p), local_tensor(weights[n])) for n, p in resumed.model.named_parameters())
    seen = [batch["input_ids"].tolist() for batch in resumed.record.batches]
    whole = [batch["input_ids"].tolist() for batch in trainer.record.batches]
    return evaluated["eval_loss"], batches, ends, (equal, seen == whole[4:])


@pytest.mark.parametrize(("world", "turbo"), [(4, CP2), (2, {"ep_size": 2})], ids=["cp2", "cp1"])
def test_streams_of_several_files_end_together(tiny, tmp_path, world, turbo):
    """C10, C10b and S8: whatever cp_size, in evaluation, in training, and resumed in the second pass."""
    run = Run(
        tiny("qwen3_moe"),
        {"text": texts(8, seed=1)},
        args={
            "per_device_eval_batch_size": 1,
            "per_device_train_batch_size": 1,
            "max_steps": 8,
            "save_strategy": "steps",
            "save_steps": 4,
        },
        turbo=turbo,
        trainer="plain",
        eval_data={"text": texts(5, seed=2)},
        gradients=False,
    )
    ranks = run_ranks(train_on_a_stream, world, run, tmp_path, timeout=120)
    losses, batches, ends, resumed = zip(*ranks, strict=True)
    plain = replace(run, args={**run.args, "per_device_eval_batch_size": 2})
    expected = run_plain(evaluate_a_stream, plain)
    assert losses == tuple(pytest.approx(expected, rel=1e-5) for _ in range(world)), "C10"
    assert {len(seen) for seen in batches} == {3}
    pairs = [(0, 2), (1, 3)] if turbo is CP2 else [(0, 1)]
    if turbo is CP2:
        for first in (0, 2):
            assert batches[first] == batches[first + 1], "ranks of a cp group read different samples"
    for one, other in pairs:
        real = [row for pair in zip(batches[one], batches[other], strict=True) for batch in pair for row in batch]
        assert len({tuple(row) for row in real}) == 5, "a sample was left out"
    assert set(map(tuple, ends)) == {(3, 6, 8)}, "C10b"
    assert set(resumed) == {(True, True)}, "S8"


# Masks.


def count_masks(run):
    """Rank function: attention masks built in one training step."""
    from hf_fsdpturbo.packing.sequence_plan import SequencePlan

    built: list[int | None] = []
    original = SequencePlan._allowed

    def counted(self, window):
        built.append(window)
        return original(self, window)

    SequencePlan._allowed = counted
    run_turbo(run)
    return built


@pytest.mark.parametrize("bf16", [False, True])
def test_a_mask_is_built_once_a_step(tiny, bf16):
    """gpt_oss: two masks for four layers, which have windows by turns. FSDP's input cast (bf16) copies dataclasses."""
    run = Run(
        tiny("gpt_oss", sliding_window=8, layers=4),
        {"text": texts(8, seed=1)},
        args={"max_steps": 1},
        turbo={**CP2, "bf16": bf16},
        model_kwargs={"attn_implementation": "eager"},
        gradients=False,
    )
    for built in run_ranks(count_masks, 2, run, timeout=90):
        assert sorted(built, key=str) == [8, None]
