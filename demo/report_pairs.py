"""The end of the preference demos: what the trainer measured on held-out pairs, and the same from plain TRL.

Everything here is one process without hf_fsdpturbo: TRL's own trainer evaluates the saved model on the held-out pairs.
What it compares with was written down by the training run itself, in trainer_state.json.

    python demo/report_pairs.py dpo outputs/demo_dpo        (or: reward outputs/demo_reward)
"""

import json
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

# float32 sums in another order, on another number of processes: a few 1e-6. A wrong weight moves them by 1e-2 or so.
TOLERANCE = 1e-4
NAMES = {
    "dpo": {"loss": "eval_loss", "margin": "eval_rewards/margins", "accuracy": "eval_rewards/accuracies"},
    "reward": {"loss": "eval_loss", "margin": "eval_margin", "accuracy": "eval_accuracy"},
}


def plain_evaluation(kind: str, out: Path) -> dict[str, float]:
    """The saved model under TRL's own trainer, in batches of what both processes had together."""
    data = load_dataset(str(out / "data"))["test"]
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    common = {
        "output_dir": str(out / "report"),
        "max_length": 192,
        "per_device_eval_batch_size": 16,
        "bf16": False,
        "activation_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    sets = {"train_dataset": data, "eval_dataset": data, "processing_class": tokenizer}
    if kind == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(out / "model", dtype=torch.float32)
        return RewardTrainer(model, RewardConfig(**common), **sets).evaluate()
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(out / "base_model", dtype=torch.float32)
    # The router's balancing loss is a statistic of a rank's batch and so no part of this comparison.
    args = DPOConfig(**common, beta=0.1, router_aux_loss_coef=0.0)
    return DPOTrainer(model, reference, args, **sets).evaluate()


def main(kind: str, out: Path) -> None:
    checkpoints = sorted((out / "model").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((checkpoints[-1] / "trainer_state.json").read_text())["log_history"]
    readings = [row for row in history if "eval_loss" in row]
    plain, worst = plain_evaluation(kind, out), 0.0
    names = NAMES[kind]
    margins, accuracies = ([row[names[label]] for row in readings] for label in ("margin", "accuracy"))
    print(
        f"held-out pairs: reward margin {margins[0]:.3f} -> {margins[-1]:.3f}, "
        f"preference accuracy {accuracies[0]:.2f} -> {accuracies[-1]:.2f}"
    )
    print("the saved model under plain TRL on one process (left: trainer on two, right: plain)")
    for label, name in names.items():
        if kind == "dpo" and label == "loss":
            continue
        distance = abs(readings[-1][name] - plain[name]) / abs(plain[name])
        worst = max(worst, distance)
        print(f"  {label:10} {readings[-1][name]:.6f} {plain[name]:.6f}   rel. distance {distance:.1e}")
    if worst > TOLERANCE:
        sys.exit(f"FAILED: a distance is above {TOLERANCE}: the saved model is not the one that was trained.")
    if readings[-1][names["accuracy"]] < 0.8:
        sys.exit("FAILED: the model did not learn the preference.")
    print(f"  all within {TOLERANCE}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
