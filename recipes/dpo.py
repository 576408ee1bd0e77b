"""Preference optimisation (DPO) with expert parallelism: TRL's own `trl dpo` script with our two classes in it.

What differs from `trl/scripts/dpo.py` (Apache-2.0) is FSDPTurboDPOConfig for DPOConfig, FSDPTurboDPOTrainer for
DPOTrainer, and that an argument nobody knows is an error: TRL's script drops an unknown key of the YAML, and a
misspelt `ep_size` would then train without expert parallelism.

The reference model is a second, sharded load of the same path; with `--use_peft` it is the base model itself.

    accelerate launch --config_file accelerate_configs/cuda_ep8.yaml recipes/dpo.py \
        --model_name_or_path Qwen/Qwen3-30B-A3B --dataset_name trl-lib/ultrafeedback_binarized \
        --learning_rate 5.0e-7 --output_dir outputs/dpo

LoRA on attention and experts (TRL's default dropout does not go with stacked experts):

    ... --use_peft --lora_r 16 --lora_dropout 0 --lora_target_modules q_proj k_proj v_proj o_proj \
        --lora_target_parameters mlp.experts.gate_up_proj mlp.experts.down_proj

A folder with train.jsonl and test.jsonl (columns prompt, chosen, rejected) is a `--dataset_name` as well; several
sources go into a `datasets:` list in the YAML of `--config`, as in TRL.
"""

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from hf_fsdpturbo import FSDPTurboDPOConfig, FSDPTurboDPOTrainer
from hf_fsdpturbo.commands.one_error import run_recipe
from hf_fsdpturbo.commands.recipe import load_splits, parse, refuse_typed


def main(
    script_args: ScriptArguments,
    training_args: FSDPTurboDPOConfig,
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

    trainer = FSDPTurboDPOTrainer(
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

    return RecipeParser((ScriptArguments, FSDPTurboDPOConfig, ModelConfig, DatasetMixtureConfig))


if __name__ == "__main__":
    run_recipe(lambda: main(*parse(make_parser())))
