"""Reward modelling with expert parallelism: a door to `hf_fsdpturbo/commands/reward.py`, as is `hf-fsdpturbo reward`.

Those are the steps of TRL's own `trl reward` script with FSDPTurboRewardConfig for RewardConfig and
FSDPTurboRewardTrainer for RewardTrainer, and an argument nobody knows is an error.

A checkpoint without a score head gets a fresh one, the same as in a run of one process.

    accelerate launch --config_file accelerate_configs/cuda_ep8.yaml recipes/reward.py \
        --model_name_or_path Qwen/Qwen3-30B-A3B --dataset_name trl-lib/ultrafeedback_binarized \
        --learning_rate 1.0e-5 --output_dir outputs/reward

With `--use_peft`, say `--lora_task_type SEQ_CLS`: the head is then trained whole beside the adapter.

A folder with train.jsonl and test.jsonl (columns chosen, rejected), or one such file, is a `--dataset_name` as well;
several sources go into a `datasets:` list in the YAML of `--config`, as in TRL.
"""

from hf_fsdpturbo.commands.recipe import load_splits
from hf_fsdpturbo.commands.reward import main, make_parser

__all__ = ["load_splits", "main", "make_parser"]

if __name__ == "__main__":
    main()
