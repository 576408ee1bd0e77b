"""Tiny releases with packed weights, in the layouts of the released ones: MXFP4 (gpt-oss), FP8 with scales a block.

FP8 is packed by Transformers' own code. Its packer of MXFP4 is a kernel from the Hub: here codes and scales are drawn,
and what they mean is asked of Transformers' reader.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WHOLE = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "conv1d", "router", "_a_", "in_proj")
"""Parts of keys that releases store in full: heads, norms, routers; small or odd matrices."""


def _write(path: str, tensors: dict[str, Tensor], settings: dict[str, Any], files: int = 2) -> str:
    """Replace a checkpoint's weights (each scale in another file than its weight, as may happen) and its config."""
    folder = Path(path)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, tensor in tensors.items():
        parts[names[key.endswith(("_scales", "_scale_inv"))]][key] = tensor.contiguous()
    for name, part in parts.items():
        save_file(part, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return path


def mxfp4(path: str) -> str:
    """Pack the experts of a gpt-oss checkpoint: [E, C, R] becomes codes [E, R, C/32, 16] and scales [E, R, C/32]."""
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for file in Path(path).glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            if not key.endswith(("gate_up_proj", "down_proj")):
                tensors[key] = tensor.bfloat16()
                continue
            experts, columns, rows = tensor.shape
            shape = (experts, rows, columns // 32)
            tensors[f"{key}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=draw)
            tensors[f"{key}_scales"] = torch.randint(114, 124, shape, dtype=torch.uint8, generator=draw)
    return _write(path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]})


def float8(path: str, block: tuple[int, int] = (8, 8), scale_fmt: str = "float", stacked: bool = False) -> str:
    """Pack the linear layers of a checkpoint, experts included, as DeepSeek-V3, Qwen3-FP8 and GLM-FP8 are.

    Args:
        path: of a checkpoint in full.
        block: rows and columns that share a scale.
        scale_fmt: "float" or "ue8m0" (a power of two in one byte).
        stacked: experts are stacks with stacks of scales.
    """
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale_fmt, modules_to_not_convert=["lm_head"])
    packer = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    tensors = {}
    for file in Path(path).glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            is_stack = ".experts." in key and tensor.ndim == 3
            if any(part in key for part in WHOLE) or not (key.endswith("weight") or is_stack) or tensor.ndim < 2:
                tensors[key] = tensor.bfloat16() if tensor.dtype == torch.float32 and tensor.ndim > 1 else tensor
                continue
            tensors.update(packer.convert({key: tensor}))
    found = {**settings.to_dict(), "fmt": "e4m3"}
    found.pop("dequantize", None)
    return _write(path, tensors, found)


def in_full(release: str, folder: str, dtype: str = "float32") -> str:
    """What plain Transformers makes of a packed release, as a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config, Mxfp4Config

    config = AutoConfig.from_pretrained(release)
    kind = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}[config.quantization_config["quant_method"]]
    keywords: Any = {"dtype": getattr(torch, dtype), "quantization_config": kind(dequantize=True)}
    weights = AutoModelForCausalLM.from_pretrained(release, **keywords).state_dict()
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    plain.load_state_dict(weights)
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(release).save_pretrained(folder)
    return folder
