"""Draws the last session of a results file: milliseconds a step of each mode, 8 and 24 layers."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = {"turbo": "ours\n(fused)", "native": "Transformers\nEP2", "fsdp2": "accelerate\nFSDP2"}


def main(source: str, target: str) -> None:
    rows = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    picked = [
        ("8 layers, bf16 storage", [r for r in rows if r["session"] == "D" and r["layers"] == 8]),
        ("8 layers, float32 storage", [r for r in rows if r["session"] == "C" and r["storage"] == "float32"]),
        ("24 layers, recompute, bf16", [r for r in rows if r["session"] == "D" and r["layers"] == 24]),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2))
    for axis, (title, bars) in zip(axes, picked, strict=True):
        names = [NAMES[r["mode"]] for r in bars]
        colours = ["#2b6cb0" if r["mode"] == "turbo" else "#a0aec0" for r in bars]
        axis.bar(names, [r["ms_step"] for r in bars], color=colours)
        for position, r in enumerate(bars):
            label = f"{r['ms_step']:.0f} ms\n{r['peak_gb']:.1f} GiB"
            axis.annotate(label, (position, r["ms_step"]), ha="center", va="bottom", fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.set_ylim(0, 1.25 * max(r["ms_step"] for r in bars))
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("ms a step, two H200")
    figure.tight_layout()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
