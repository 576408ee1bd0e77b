"""Floating-point operations of the tokens that were trained on, and the device's peak: together the MFU.

Model FLOPs, from the model's own shapes: what the mathematics asks for, whatever a recompute does again. An element of
a matrix that every token meets costs 2 a token in forward, 2 for the gradient of its input, and 2 for its own where it
is trained; an element of an expert the same for each token that was sent there; softmax attention costs 6 (size of a
query + size of a value) for each head and each key that a token attends to, causal. A reference model's pass is not
counted, the state of linear attention neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_fsdpturbo.packing.text_models import text_models

PEAKS: dict[str, tuple[float, str]] = {
    "H200": (790e12, "a bf16 product of random matrices, measured on one"),
    "H100 80GB HBM3": (989e12, "NVIDIA's data sheet, bf16, dense"),
    "A100": (312e12, "NVIDIA's data sheet, bf16, dense"),
}
"""FLOP/s by a word of the device's name, and where the number is from; another device has no MFU."""


def peak_of(device: torch.device) -> tuple[float, str, str] | None:
    """``(FLOP/s in bf16, source, the device's name)``; None where it is not known."""
    if device.type == "cpu":
        return None
    name = str(torch.get_device_module(device.type).get_device_name(device))
    return next((peak + (name,) for words, peak in PEAKS.items() if re.search(rf"\b{words}\b", name)), None)


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one model's training.

    Attributes:
        token: of a token, its experts and attention apart.
        pair: of a token in one expert, by layer.
        key: of a key that a token attends to, over the layers that see all before it.
        near_key: the same over the layers that see ``window`` of them.
        window: None where no layer has one.
    """

    token: float
    pair: tuple[float, ...]
    key: float
    near_key: float
    window: int | None

    def of(self, tokens: int, pairs: list[int], keys: int, near_keys: int) -> float:
        """FLOPs of so many tokens, pairs by layer, keys, and keys inside the window."""
        experts = sum(flops * number for flops, number in zip(self.pair, pairs, strict=True))
        return self.token * tokens + experts + self.key * keys + self.near_key * near_keys


def model_flops(model: Any, experts: dict[str, tuple[nn.Module, int]]) -> ModelFlops | None:
    """From the parameters of a model, sharded or whole, and its config; None where that does not name its attention.

    Args:
        model: a Transformers model, or PEFT's round one.
        experts: experts modules and their number of experts, by name, as ``expert_counts.counted_modules`` has them.
    """
    routed = {p: number for module, number in experts.values() for p in module.parameters()}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    embedding = model.get_input_embeddings()
    parts = [*(text_models(model) or [model]), *([] if head is None else [head])]
    dense = {p for part in parts for p in part.parameters()} - routed.keys()
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    if not tied:
        dense -= set(embedding.parameters())
    pair = tuple(sum(map(_flops, module.parameters())) / number for module, number in experts.values())
    config = model.config.get_text_config()
    sizes = [getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")]
    if not all(isinstance(size, int) for size in sizes):
        return None
    whole, near, window = _attention_layers(config)
    key = 6.0 * config.num_attention_heads * sum(_head_sizes(config))
    return ModelFlops(sum(map(_flops, dense)), pair, key * whole, key * near, window)


def _flops(parameter: nn.Parameter) -> float:
    """Of one token; a vector is no matrix product."""
    return parameter.numel() * (6.0 if parameter.requires_grad else 4.0) if parameter.ndim > 1 else 0.0


def _attention_layers(config: Any) -> tuple[int, int, int | None]:
    """Layers whose attention sees everything before a token, those that see a window, and the window."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    near = sum(kind == "sliding_attention" for kind in kinds) if isinstance(window, int) else 0
    linear = sum(kind in ("linear_attention", "mamba", "conv") for kind in kinds)
    return len(kinds) - near - linear, near, window if near else None


def _head_sizes(config: Any) -> tuple[int, int]:
    """Elements of a head's query (and key), and of its value."""
    plain = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    latent = getattr(config, "qk_nope_head_dim", None)
    query = plain if latent is None else latent + config.qk_rope_head_dim
    return query, getattr(config, "v_head_dim", None) or plain
