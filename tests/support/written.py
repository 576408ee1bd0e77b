"""Reading back what a run has written."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open


def tensors_of(directory: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a folder."""
    found = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}
    return found
