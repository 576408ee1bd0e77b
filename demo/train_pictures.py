"""Trains the picture demo's model: TRL's vision collator under FSDPTurboSFTTrainer, tower and projector included.

    accelerate launch --config_file accelerate_configs/cpu_ep2.yaml demo/train_pictures.py outputs/demo_vl [steps]

A script of its own, since `AutoProcessor` finds the demo's processor only where it has been registered; a released
model with torchvision installed takes `recipes/sft.py` (recipes/sft_vlm.yaml).
"""

import sys

import picture_processor  # noqa: F401  (registers the processor)
from datasets import Dataset

from hf_fsdpturbo import FSDPTurboSFTConfig, FSDPTurboSFTTrainer


def main(out: str, steps: int = 400) -> None:
    args = FSDPTurboSFTConfig(
        output_dir=f"{out}/model",
        max_length=None,
        per_device_train_batch_size=16,
        max_steps=steps,
        learning_rate=3e-3,
        adam_beta2=0.95,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        max_grad_norm=1.0,
        bf16=False,
        activation_checkpointing=False,
        logging_steps=20,
        save_strategy="steps",
        save_steps=steps,
        report_to="none",
        seed=0,
    )
    trainer = FSDPTurboSFTTrainer(f"{out}/base_model", args, train_dataset=Dataset.load_from_disk(f"{out}/train"))
    trainer.train()
    trainer.save_model(f"{out}/model")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
