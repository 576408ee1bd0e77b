"""What the three recipes share: the steps of TRL's own scripts, from parsed arguments to a saved model.

What differs from ``trl/scripts/*.py`` (Apache-2.0) is our configs and trainers, and that an argument nobody knows is
an error: TRL's scripts drop an unknown key of the YAML, and a misspelt ``ep_size`` would then train without expert
parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_fsdpturbo.commands.data_file import with_file
from hf_fsdpturbo.commands.one_error import run_recipe
from hf_fsdpturbo.commands.recipe import named_splits, parse, refuse_typed


def run(make_parser: Callable[[], Any], trainer_class: Any) -> None:
    """Parse the command line and train; the last thing a recipe does."""
    run_recipe(lambda: train(trainer_class, *parse(make_parser())))


def train(trainer_class: Any, script_args: Any, training_args: Any, model_args: Any, dataset_args: Any) -> None:
    """Train, save, and push where asked.

    Args:
        trainer_class: one of the trainers of ``hf_fsdpturbo.trl``.
        script_args: ``trl.ScriptArguments``.
        training_args: the trainer's config.
        model_args: ``trl.ModelConfig``.
        dataset_args: ``trl.DatasetMixtureConfig``.

    Raises:
        ValueError: an argument that cannot be honoured, by name.
    """
    from trl import get_peft_config, get_quantization_config

    refuse_typed(model_args)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    named = script_args.dataset_name
    script_args, dataset_args = with_file(script_args, dataset_args)
    dataset = named_splits(named, script_args, dataset_args, training_args.seed)

    trainer = trainer_class(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Trained, and saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=named)
    trainer.end()
