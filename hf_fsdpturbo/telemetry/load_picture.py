"""``expert_load.png``: expert load of a run as a picture; the only file that imports matplotlib.

W windows, M MoE layers, E experts. Load is a share of tokens times E: 1 where all experts get the same.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from hf_fsdpturbo.telemetry.load_record import FILE, LoadRecord

PICTURE = "expert_load.png"
WORST = 4
"""Layers whose load over time is drawn."""


def relative_load(counts: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """``counts [..., M, E]`` over the layer's mean; ``experts [M]``. Places without an expert, or a token, are nan."""
    mean = counts.sum(-1, keepdims=True) / experts[:, None]
    there = np.arange(counts.shape[-1]) < experts[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(there, counts / mean, np.nan)


def draw_load(record: LoadRecord, folder: str) -> str:
    """Write the picture into ``folder`` and return its path.

    Raises:
        ImportError: matplotlib is not installed; says how to get it.
        ValueError: the record is empty.
    """
    if not record.steps or not record.layers:
        raise ValueError(f"{os.path.join(folder, FILE)} has no logging window yet: nothing to draw.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError(
            f"{PICTURE} needs matplotlib: pip install 'hf_fsdpturbo[report]', then hf-fsdpturbo report {folder}"
        ) from error
    figure = Figure(figsize=(13, 7.5), layout="constrained")  # without pyplot: nothing global, no display
    FigureCanvasAgg(figure)
    counts_WME = np.array(record.counts)
    experts_M = np.array(list(record.layers.values()))
    axes = figure.subplots(2, 3, height_ratios=(3, 2))
    _draw_heatmaps(figure, axes[0], record, counts_WME, experts_M)
    _draw_worst(axes[1, 0], record, counts_WME, experts_M)
    for place, values, label in ((1, record.losses, "loss"), (2, record.rates, "tokens a second")):
        axes[1, place].plot(record.steps, values, color="tab:blue")
        axes[1, place].set(xlabel="optimizer step", title=label, ylim=(0, None) if place == 2 else None)
        axes[1, place].grid(alpha=0.3)
    for axis in axes[0]:
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    path = os.path.join(folder, PICTURE)
    figure.savefig(path, dpi=90)
    return path


def _draw_heatmaps(figure: Any, axes: Any, record: LoadRecord, counts_WME: np.ndarray, experts_M: np.ndarray) -> None:
    """Start, middle and end: each a tenth of the run, at least a window."""
    windows = len(record.steps)
    part = max(1, windows // 10)
    starts = (0, (windows - part) // 2, windows - part)
    loads = [relative_load(counts_WME[start : start + part].sum(0), experts_M) for start in starts]
    top = float(np.nanmax([np.nanmax(load, initial=1.0) for load in loads]))
    for axis, load, start, when in zip(axes, loads, starts, ("start", "middle", "end"), strict=True):
        begun = 1 if start == 0 else record.steps[start - 1] + 1
        image = axis.imshow(load, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0.0, vmax=top)
        ended = record.steps[start + part - 1]
        axis.set(xlabel="expert", title=f"{when} (steps {begun} to {ended})")
    axes[0].set_ylabel("MoE layer")
    figure.colorbar(image, ax=list(axes), label="load (1: even)", fraction=0.03)


def _draw_worst(axis: Any, record: LoadRecord, counts_WME: np.ndarray, experts_M: np.ndarray) -> None:
    """Maximum over mean in each window, of the layers where it was largest over the run."""
    with np.errstate(invalid="ignore"):
        worst_WM = np.nanmax(np.nan_to_num(relative_load(counts_WME, experts_M)), axis=-1)
    for layer in np.argsort(worst_WM.mean(0))[::-1][:WORST]:
        axis.plot(record.steps, worst_WM[:, layer], label=f"layer {layer}")
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set(xlabel="optimizer step", title="largest load of the worst layers")
    axis.legend(fontsize="small")
    axis.grid(alpha=0.3)
