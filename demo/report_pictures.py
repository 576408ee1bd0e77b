"""The end of the picture demo: answers about held-out pictures before and after, by plain Transformers in one process.

    python demo/report_pictures.py outputs/demo_vl        writes outputs/demo_vl/{pictures.png,report.txt}
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch
from datasets import Dataset
from make_pictures import COLOURS, SHAPES
from picture_processor import PictureProcessor
from report import read_history
from transformers import AutoProcessor, Qwen3VLMoeForConditionalGeneration

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (the backend has to be chosen first: there may be no display)

SHOWN = 12


@torch.no_grad()
def answers(model: Any, processor: PictureProcessor, rows: list[dict[str, Any]]) -> list[str]:
    """Greedy answers, question by question."""
    found = []
    for row in rows:
        parts = [{"type": "image", "image": image} for image in row["images"]]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": row["prompt"][0]["content"]}]}
        inputs = processor.apply_chat_template(
            [message], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        out = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        text = processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        found.append(" ".join("".join(c if c.isascii() and c.isprintable() else "." for c in text).split()))
    return found


def share(right: list[bool]) -> str:
    return f"{sum(right) / len(right):.0%}"


def scores(rows: list[dict[str, Any]], found: list[str]) -> dict[str, str]:
    truth = [row["completion"][0]["content"] for row in rows]
    pictures = [(a, b) for row, a, b in zip(rows, found, truth, strict=True) if row["images"]]
    sums = [a == b for row, a, b in zip(rows, found, truth, strict=True) if not row["images"]]
    return {
        "colour and shape": share([a == b for a, b in pictures]),
        "colour": share([a.split()[:1] == b.split()[:1] for a, b in pictures]),
        "shape": share([a.split()[1:2] == b.split()[1:] for a, b in pictures]),
        "sums (no picture)": share(sums),
    }


def draw(rows: list[dict[str, Any]], before: list[str], after: list[str], history: list[Any], path: Path) -> None:
    figure, axes = pyplot.subplots(3, SHOWN // 2, figsize=(14, 9))
    shown = [index for index, row in enumerate(rows) if row["images"]][:SHOWN]
    for place, index in zip(axes[:2].flat, shown, strict=True):
        place.imshow(rows[index]["images"][0])
        right = after[index] == rows[index]["completion"][0]["content"]
        place.set_title(f"before: {before[index][:18] or '(nothing)'}\nafter: {after[index]}", fontsize=9,
                        color="darkgreen" if right else "darkred")  # fmt: skip
        place.axis("off")
    grid = axes[2, 0].get_gridspec()
    for place in axes[2]:
        place.remove()
    curve = figure.add_subplot(grid[2, :])
    points = [(row["step"], row["loss"]) for row in history if "loss" in row]
    curve.plot(*zip(*points, strict=True))
    curve.set(xlabel="optimizer step", ylabel="loss (nats per token)", title="Qwen3-VL-MoE, 8 experts, EP 2, CPU")
    curve.grid(alpha=0.3)
    figure.tight_layout(h_pad=2)
    figure.savefig(path, dpi=110)


def main(out: Path) -> None:
    rows = list(Dataset.load_from_disk(str(out / "test")))
    found = {}
    for name in ("base_model", "model"):
        processor = AutoProcessor.from_pretrained(out / name)
        model = Qwen3VLMoeForConditionalGeneration.from_pretrained(out / name, dtype=torch.float32).eval()
        found[name] = answers(model, processor, rows)
    before, after = (scores(rows, found[name]) for name in ("base_model", "model"))
    chance = {
        "colour and shape": f"{1 / (len(COLOURS) * len(SHAPES)):.0%}",
        "colour": f"{1 / len(COLOURS):.0%}",
        "shape": f"{1 / len(SHAPES):.0%}",
        "sums (no picture)": "10%",
    }
    lines = [f"{'held-out rows':20} before  after  by chance"]
    lines += [f"{name:20} {before[name]:>6} {after[name]:>6} {chance[name]:>10}" for name in after]
    (out / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(rows, found["base_model"], found["model"], read_history(out / "model"), out / "pictures.png")
    print("\n".join([*lines, f"pictures with answers: {out / 'pictures.png'}"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
