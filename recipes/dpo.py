"""Preference optimisation (DPO) with expert parallelism: a door to `hf_fsdpturbo/commands/dpo.py`.

`hf-fsdpturbo dpo` is another. Those are the steps of TRL's own `trl dpo` script with FSDPTurboDPOConfig for DPOConfig
and FSDPTurboDPOTrainer for DPOTrainer, and an argument nobody knows is an error.

The reference model is a second, sharded load of the same path; with `--use_peft` it is the base model itself.

    accelerate launch --config_file accelerate_configs/cuda_ep8.yaml recipes/dpo.py \
        --model_name_or_path Qwen/Qwen3-30B-A3B --dataset_name trl-lib/ultrafeedback_binarized \
        --learning_rate 5.0e-7 --output_dir outputs/dpo

LoRA on attention and experts (TRL's default dropout does not go with stacked experts):

    ... --use_peft --lora_r 16 --lora_dropout 0 --lora_target_modules q_proj k_proj v_proj o_proj \
        --lora_target_parameters mlp.experts.gate_up_proj mlp.experts.down_proj

A folder with train.jsonl and test.jsonl (columns prompt, chosen, rejected), or one such file, is a `--dataset_name` as
well; several sources go into a `datasets:` list in the YAML of `--config`, as in TRL.
"""

from hf_fsdpturbo.commands.dpo import main, make_parser
from hf_fsdpturbo.commands.recipe import load_splits

__all__ = ["load_splits", "main", "make_parser"]

if __name__ == "__main__":
    main()
