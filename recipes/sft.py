"""Supervised fine-tuning with expert parallelism: a door to `hf_fsdpturbo/commands/sft.py`, as is `hf-fsdpturbo sft`.

Those are the steps of TRL's own `trl sft` script with FSDPTurboSFTConfig for SFTConfig and FSDPTurboSFTTrainer for
SFTTrainer, and an argument nobody knows is an error.

Any model and any TRL dataset, from the Hub or from disk:

    accelerate launch --config_file accelerate_configs/cuda_ep8.yaml recipes/sft.py \
        --model_name_or_path Qwen/Qwen3-30B-A3B --dataset_name trl-lib/Capybara --output_dir outputs/capybara

A folder with train.jsonl and test.jsonl (or .parquet, .csv) is a `--dataset_name` as well, and so is one such file.
Several sources go into a `datasets:` list in the YAML of `--config`, as in TRL:

    datasets:
      - path: json
        data_files: my_conversations.jsonl
"""

from hf_fsdpturbo.commands.recipe import load_splits
from hf_fsdpturbo.commands.sft import main, make_parser

__all__ = ["load_splits", "main", "make_parser"]

if __name__ == "__main__":
    main()
