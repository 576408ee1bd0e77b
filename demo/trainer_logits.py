"""Writes down the logits of the sharded trainer, for demo/report.py to compare with plain Transformers.

`recipes/sft.py` has no place for a callback (it is TRL's script), so the trainer is brought back here as it was: same
launch, same two ranks, experts spread as before, every rank's own weights from the checkpoint that this rank wrote at
the last step. The exported model, whose correctness is the question, is not read. That it is the same trainer shows in
its evaluation, which must equal the last one that the training run logged.

    accelerate launch --config_file accelerate_configs/cpu_ep2.yaml demo/trainer_logits.py outputs/demo
"""

import json
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from safetensors.torch import save_file
from transformers.trainer_utils import get_last_checkpoint

from hf_fsdpturbo import FSDPTurboSFTConfig, FSDPTurboSFTTrainer

NUM_SEQUENCES = 8
NUM_TOKENS = 64


def main(out: Path) -> None:
    checkpoint = get_last_checkpoint(str(out / "model"))
    data = load_dataset(str(out / "data"))
    args = FSDPTurboSFTConfig(
        output_dir=str(out / "report"),
        max_length=256,
        per_device_eval_batch_size=8,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = FSDPTurboSFTTrainer(
        model=str(out / "base_model"), args=args, train_dataset=data["test"], eval_dataset=data["test"]
    )
    trainer._load_from_checkpoint(checkpoint)
    metrics = trainer.evaluate()

    rows = [row for row in trainer.eval_dataset["input_ids"] if len(row) >= NUM_TOKENS][:NUM_SEQUENCES]
    input_ids = torch.tensor([row[:NUM_TOKENS] for row in rows])
    trainer.model.eval()
    with torch.no_grad():  # every rank takes part: the experts of a layer are spread over all of them
        logits = trainer.model(input_ids=input_ids).logits
    if trainer.accelerator.is_main_process:
        save_file({"input_ids": input_ids, "logits": logits.contiguous()}, out / "trainer_logits.safetensors")
        history = json.loads((Path(checkpoint) / "trainer_state.json").read_text())["log_history"]
        logged = next(row["eval_loss"] for row in reversed(history) if "eval_loss" in row)
        print(f"held-out loss: training run {logged:.7f}, trainer brought back {metrics['eval_loss']:.7f}")
        if abs(logged - metrics["eval_loss"]) > 1e-5:
            sys.exit("FAILED: the checkpoint is not the trainer that wrote it.")
    trainer.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
