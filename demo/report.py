"""The end of the demo: loss curve, a sample before and after, and the proof that plain Transformers reads the result.

Everything here is one process without hf_fsdpturbo. What it compares with was written down by the training run itself
(its evaluation of the held-out passages, in trainer_state.json) and by demo/trainer_logits.py.

    python demo/report.py outputs/demo        writes outputs/demo/loss.png and outputs/demo/report.txt
"""

import json
import sys
from pathlib import Path

import matplotlib
import torch
from datasets import load_dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (the backend has to be chosen first: there may be no display)

PROMPT = "# lambda"
# float32 sums in another order, on another number of processes: a few 1e-6. A wrong weight moves them by 1e-2 or so.
TOLERANCE = 1e-4


def read_history(run: Path) -> list[dict[str, float]]:
    """The trainer's own log, from its last checkpoint."""
    checkpoints = sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return json.loads((checkpoints[-1] / "trainer_state.json").read_text())["log_history"]


def plot_loss(history: list[dict[str, float]], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held-out passages", "o--")):
        points = [(row["step"], row[key]) for row in history if key in row]
        axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="Qwen3-MoE, 8 experts, EP 2, CPU")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=100, do_sample=True, temperature=0.6, top_p=0.9)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def plain_evaluation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> dict[str, float]:
    """TRL's own SFTTrainer on one process, on the passages and batches of the training run's evaluation."""
    data = load_dataset(str(out / "data"))
    args = SFTConfig(
        output_dir=str(out / "report"),
        max_length=256,
        per_device_eval_batch_size=16,  # of the two ranks together: whose loss the trainer logs
        bf16=False,
        activation_checkpointing=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model, args, train_dataset=data["test"], eval_dataset=data["test"], processing_class=tokenizer
    )
    return trainer.evaluate()


def compare(name: str, trainer: float | torch.Tensor, plain: float | torch.Tensor) -> tuple[str, bool]:
    """One line of the report: relative distance ||a - b|| / ||b||, and whether it is within the tolerance."""
    a, b = torch.as_tensor(trainer, dtype=torch.float64), torch.as_tensor(plain, dtype=torch.float64)
    distance = float((a - b).norm() / b.norm())
    values = f"{float(a):.7f} {float(b):.7f}" if a.ndim == 0 else f"{'x'.join(map(str, a.shape))} values"
    return f"  {name:26} {values:>24}   rel. distance {distance:.1e}", distance <= TOLERANCE


def main(out: Path) -> None:
    history = read_history(out / "model")
    plot_loss(history, out / "loss.png")
    losses = [row["loss"] for row in history if "loss" in row]

    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    before = AutoModelForCausalLM.from_pretrained(out / "base_model", dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    torch.manual_seed(0)
    samples = [sample(before, tokenizer), sample(after, tokenizer)]

    recorded = load_file(out / "trainer_logits.safetensors")
    with torch.no_grad():
        logits = after(recorded["input_ids"]).logits
    trained_loss = next(row["eval_loss"] for row in reversed(history) if "eval_loss" in row)
    checks = [
        compare("logits", recorded["logits"], logits),
        compare("held-out loss", trained_loss, plain_evaluation(after, tokenizer, out)["eval_loss"]),
    ]

    report = "\n".join(
        [
            f"loss   {losses[0]:.3f} at the start -> {losses[-1]:.3f} at the end (curve: {out / 'loss.png'})",
            f"load of the experts: {out / 'model' / 'expert_load.png'}",
            f"\nbefore\n{samples[0]}\n\nafter\n{samples[1]}\n",
            "plain AutoModelForCausalLM.from_pretrained against the sharded trainer (left: trainer, right: plain)",
            *(line for line, _ in checks),
        ]
    )
    (out / "report.txt").write_text(report + "\n", encoding="utf-8")
    print(report)
    if not all(passed for _, passed in checks):
        sys.exit(f"FAILED: a distance is above {TOLERANCE}: the saved model is not the one that was trained.")
    print(f"  all within {TOLERANCE}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
