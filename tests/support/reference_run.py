"""One plain process on the very micro-batches that the ranks saw; the recorder is ``hf_fsdpturbo.verify``'s."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.verify.recording import Batch, Record, merge_batches, recording, whole, whole_parameters  # noqa: F401
from tests.support.hand_counts import HandCounts
from tests.support.records import DEFAULT_ARGS, OWN_ARGS, Run

PLAIN = ("plain", "mixin", "own loop")
"""Transformers' trainer: under our class, under the bare mixin, and with an evaluation loop of its own."""


def own_loop(trainer_class: type) -> type:
    """Subclass of a trainer whose evaluation gathers with ``gather`` and takes the mean itself, as some do."""
    from transformers.trainer_utils import EvalLoopOutput

    class OwnLoop(trainer_class):  # type: ignore[misc,valid-type]
        def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            self.model.eval()
            losses = []
            for inputs in dataloader:
                loss, _, _ = self.prediction_step(self.model, inputs, prediction_loss_only=True)
                losses.append(self.accelerator.gather(loss.repeat(len(inputs["input_ids"]))))
            mean = torch.cat(losses).mean().item()
            return EvalLoopOutput(None, None, {"eval_loss": mean}, sum(map(len, losses)))

    return OwnLoop


def _classes(family: str, turbo: bool) -> tuple[type, type]:
    """Trainer and config class."""
    import transformers
    import trl

    import hf_fsdpturbo

    if family in PLAIN:
        trainer_class = own_loop(transformers.Trainer) if family == "own loop" else transformers.Trainer
        if not turbo:
            return trainer_class, transformers.TrainingArguments

        class MyTrainer(hf_fsdpturbo.FSDPTurboTrainerMixin, trainer_class):  # type: ignore[misc,valid-type]
            """What README shows."""

        ours = hf_fsdpturbo.FSDPTurboTrainer if family == "plain" else MyTrainer
        return ours, hf_fsdpturbo.FSDPTurboTrainingArguments
    name = {"sft": "SFT", "dpo": "DPO", "reward": "Reward"}[family]
    module, prefix = (hf_fsdpturbo, "FSDPTurbo") if turbo else (trl, "")
    return getattr(module, f"{prefix}{name}Trainer"), getattr(module, f"{prefix}{name}Config")


def build_trainer(run: Run, turbo: bool, **more_args: Any) -> Any:
    """The (recording) trainer of a run; what users would write, nothing else."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

    if run.with_images:
        import tests.support.tiny_pictures  # noqa: F401  (registers the processor)
    trainer_class, config_class = _classes(run.trainer, turbo)
    own = OWN_ARGS.get(run.trainer, {})
    arguments = {**DEFAULT_ARGS, **own, **run.args, **(run.turbo if turbo else {}), **more_args}
    arguments.setdefault("output_dir", tempfile.mkdtemp(prefix="run_"))
    if run.trainer not in PLAIN and not run.as_object:
        arguments["model_init_kwargs"] = dict(run.model_kwargs) or None
    config = config_class(**arguments)
    model: Any = run.model
    if run.as_object or (run.trainer in PLAIN and not turbo):
        auto_class = AutoModelForImageTextToText if run.with_images else AutoModelForCausalLM
        model = auto_class.from_pretrained(run.model, **{"dtype": torch.float32, **run.model_kwargs})
        if run.prepare is not None:
            run.prepare(model)
    tokenizer = None if run.with_images else PreTrainedTokenizerFast.from_pretrained(run.model)
    # Folders written by Dataset.save_to_disk have a cache that all ranks see, as real data sets do.
    data = _dataset(run.data)
    evaluation = run.eval_data and _dataset(run.eval_data)
    kwargs = dict(run.trainer_kwargs)
    if run.trainer in PLAIN:
        from transformers import DataCollatorForLanguageModeling

        kwargs["data_collator"] = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        data, evaluation = _tokenized(data, tokenizer), evaluation and _tokenized(evaluation, tokenizer)
    return recording(trainer_class)(
        model=model,
        args=config,
        train_dataset=data,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        record_gradients=run.gradients,
        **kwargs,
    )


def _dataset(data: dict[str, list[Any]] | str) -> Any:
    from datasets import Dataset

    if isinstance(data, Dataset):
        return data
    return Dataset.load_from_disk(data) if isinstance(data, str) else Dataset.from_dict(data)


def _tokenized(data: Any, tokenizer: Any) -> Any:
    return data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=48), remove_columns=["text"])


def _carry_out(trainer: Any, run: Run) -> Record:
    by_hand = count_by_hand(trainer) if trainer.replay is not None else None
    trainer.record.start_weights = whole_parameters(trainer.model)
    if run.before_train is not None:
        trainer.record.extra["before"] = run.before_train(trainer)
    trainer.train()
    record = trainer.finish_record()
    record.load = read_windows(trainer) if by_hand is None else by_hand.steps
    record.entropies = [log["experts/router_entropy"] for log in record.log_history if "experts/router_entropy" in log]
    record.entropies = record.entropies if by_hand is None else by_hand.entropies
    record.extra["images"] = [] if by_hand is None else by_hand.images
    if run.after_train is not None:
        record.extra["after"] = run.after_train(trainer)
    return record


def count_by_hand(trainer: Any) -> HandCounts:
    """Counts of a reference's training steps."""
    from transformers import TrainerCallback

    by_hand, backward = HandCounts(trainer.model), trainer.accelerator.backward

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            by_hand.end_step()

    def marked(*args: Any, **kwargs: Any) -> None:
        with by_hand.backward():
            backward(*args, **kwargs)

    trainer.accelerator.backward = marked
    trainer.add_callback(Steps())
    return by_hand


def read_windows(trainer: Any) -> list[list[Tensor]]:
    """Expert load of each logging window as rank 0 has written it, ``[E]`` by layer; the other ranks have none."""
    from hf_fsdpturbo.telemetry.load_record import FILE, read_load

    if not os.path.exists(os.path.join(trainer.args.output_dir, FILE)):
        return []
    record = read_load(trainer.args.output_dir)
    return [
        [torch.from_numpy(row[:experts]) for row, experts in zip(counts_ME, record.layers.values(), strict=True)]
        for counts_ME in record.counts
    ]


def forget_accelerate() -> None:
    """So that the next trainer of this process may have another mixed precision; the process group stays."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()


def run_turbo(run: Run) -> Record:
    """Rank function: the sharded run. Rank 0's record has the whole tensors, every rank's has its micro-batches."""
    import torch.distributed as dist

    forget_accelerate()
    trainer = build_trainer(run, turbo=True)
    gc.freeze()  # train() begins with a full collection, and thaws all at its end: imports alone cost 0.2 s a run
    record = _carry_out(trainer, run)
    if dist.is_initialized() and dist.get_rank() > 0:
        record = replace(record, gradients=[], weights={}, start_weights={})
    return record


def run_turbo_all(runs: list[Run]) -> list[Record]:
    """Rank function: several runs of one topology after another, so that one spawn serves them all."""
    return [run_turbo(run) for run in runs]


def run_reference(run: Run, world_size: int, batches: list[Batch]) -> Record:
    """For one plain process: the stock trainer on recorded micro-batches (see the note on top)."""
    forget_accelerate()
    trainer = build_trainer(run, turbo=False, gradient_accumulation_steps=run.accumulation * world_size)
    trainer.replay = batches
    return _carry_out(trainer, run)


def run_references(jobs: list[tuple[Run, int, list[Batch]]]) -> list[Record]:
    """For one plain process: several references."""
    return [run_reference(*job) for job in jobs]


def sharded_and_reference(
    runs: dict[str, Run], world_size: int, *, cp_size: int = 1, timeout: float = 120, yardstick: Collection[str] = ()
) -> dict[str, tuple[Record, Record, Record | None]]:
    """Do all runs on ``world_size`` ranks in one spawn, then their references, each in one plain process.

    Args:
        runs: by name.
        cp_size: ranks that share a batch (innermost).
        timeout: seconds for each of the two processes groups.
        yardstick: names of runs whose reference is also run with ``experts_implementation="eager"``: the distance
            between the two references says how well conditioned each tensor is (see ``compare``).

    Returns:
        by name: rank 0's record, the reference, the second reference or None. All ranks' batches are in the first
        one's ``extra["ranks"]``.
    """
    from tests.support.spawn import run_plain_jobs, run_ranks

    by_rank = run_ranks(run_turbo_all, world_size, list(runs.values()), timeout=timeout)
    jobs, others = [], {}
    for index, (name, run) in enumerate(runs.items()):
        ranks = [records[index] for records in by_rank]
        batches = merge_batches(ranks[::cp_size])
        jobs.append((run, world_size // cp_size, batches))
        if name in yardstick:
            eager = replace(run, model_kwargs={**run.model_kwargs, "experts_implementation": "eager"})
            others[name] = (eager, world_size // cp_size, batches)
    references = run_plain_jobs(run_references, [*jobs, *others.values()], timeout=timeout)
    seconds = dict(zip(others, references[len(jobs) :], strict=True))
    result = {}
    for index, name in enumerate(runs):
        record = by_rank[0][index]
        record.extra["ranks"] = [records[index] for records in by_rank]
        result[name] = (record, references[index], seconds.get(name))
    return result
