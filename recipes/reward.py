"""Reward modelling with expert parallelism: the steps of TRL's own `trl reward` script, with our two classes in it.

What differs from `trl/scripts/reward.py` (Apache-2.0) is FSDPTurboRewardConfig for RewardConfig,
FSDPTurboRewardTrainer for RewardTrainer, and that an argument nobody knows is an error: TRL's script drops an unknown
key of the YAML, and a misspelt `ep_size` would then train without expert parallelism.

A checkpoint without a score head gets a fresh one, the same as in a run of one process.

    accelerate launch --config_file accelerate_configs/cuda_ep8.yaml recipes/reward.py \
        --model_name_or_path Qwen/Qwen3-30B-A3B --dataset_name trl-lib/ultrafeedback_binarized \
        --learning_rate 1.0e-5 --output_dir outputs/reward

With `--use_peft`, say `--lora_task_type SEQ_CLS`: the head is then trained whole beside the adapter.

A folder with train.jsonl and test.jsonl (columns chosen, rejected) is a `--dataset_name` as well; several sources go
into a `datasets:` list in the YAML of `--config`, as in TRL.
"""

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from hf_fsdpturbo import FSDPTurboRewardConfig, FSDPTurboRewardTrainer
from hf_fsdpturbo.commands.one_error import run_recipe
from hf_fsdpturbo.commands.recipe import load_splits, parse, refuse_typed


def main(
    script_args: ScriptArguments,
    training_args: FSDPTurboRewardConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> None:
    from trl import get_peft_config, get_quantization_config

    refuse_typed(model_args)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    dataset = load_splits(script_args, dataset_args, training_args.seed)

    trainer = FSDPTurboRewardTrainer(
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
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.end()


def make_parser() -> TrlParser:
    from hf_fsdpturbo.trl import RecipeParser

    return RecipeParser((ScriptArguments, FSDPTurboRewardConfig, ModelConfig, DatasetMixtureConfig))


if __name__ == "__main__":
    run_recipe(lambda: main(*parse(make_parser())))
