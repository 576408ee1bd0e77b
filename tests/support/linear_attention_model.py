"""A small Qwen3.5-MoE text model (three linear-attention layers of four), and an installer of stand-in packages."""

import sys
from types import ModuleType

import torch
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

VOCAB = 64


def small_qwen3_5_moe(num_layers: int = 4, seed: int = 0, **changes) -> Qwen3_5MoeForCausalLM:
    config = Qwen3_5MoeTextConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, initializer_range=0.05, **changes,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Qwen3_5MoeForCausalLM(config)


def install_module(monkeypatch, name: str, **members) -> ModuleType:
    """Put a module (and its parents) into sys.modules for one test."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            module = ModuleType(path)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, path, module)
            if end > 1:
                monkeypatch.setattr(sys.modules[".".join(parts[:end - 1])], parts[end - 1], module, raising=False)
    for key, value in members.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)
    return sys.modules[name]
