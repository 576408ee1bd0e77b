"""Tiny MoE checkpoints of five families, a byte-level tokenizer and real text: all made on the spot, no network.

Weights are drawn at std 0.02: at 0.08 training is chaotic and agreeing runs drift apart. Experts of different sizes in
hidden and ffn dims, so that a swapped dim cannot go unseen.
"""

from __future__ import annotations

import functools
import pydoc_data.topics
from pathlib import Path
from typing import Any

VOCAB_SIZE = 384
HIDDEN, FFN, HEAD_DIM = 32, 16, 8
FAMILIES = ("qwen3_moe", "qwen3_5_moe", "mixtral", "deepseek_v3", "gpt_oss")
AUX = {"router_aux_loss_coef": 0.05}  # the usual 0.001 would hide a wrong factor below the tolerance
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@functools.cache
def _topics() -> list[str]:
    """Pages of the Python language reference, which ships inside the standard library."""
    return [text for _, text in sorted(pydoc_data.topics.topics.items())]


@functools.cache
def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:2000] for text in _topics()], trainer)
    return tokenizer.to_str()


def tiny_tokenizer() -> Any:
    """Byte-level BPE of 384 tokens as ``PreTrainedTokenizerFast`` (pad 0, bos 1, eos 2)."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=512,
    )


def texts(number: int, *, shortest: int = 20, longest: int = 160, seed: int = 0) -> list[str]:
    """``number`` pieces of real text, lengths (in characters) uneven between ``shortest`` and ``longest``."""
    import random

    draw = random.Random(seed)
    pages = [page for page in _topics() if len(page) > 4 * longest]
    result = []
    for _ in range(number):
        page, length = draw.choice(pages), draw.randint(shortest, longest)
        start = draw.randrange(len(page) - length)
        result.append(page[start : start + length])
    return result


def text_dataset(number: int, **kwargs: Any) -> Any:
    """A ``datasets.Dataset`` with column ``text``; keywords of :func:`texts`."""
    from datasets import Dataset

    return Dataset.from_dict({"text": texts(number, **kwargs)})


def tiny_config(
    kind: str, *, num_experts: int = 8, top_k: int = 2, layers: int = 2, tie: bool = False, **overrides: Any
) -> Any:
    """Transformers config of a tiny model of one family; ``overrides`` are config fields."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "initializer_range": 0.02,
        **TOKENS,
    }
    if kind == "qwen3_moe":
        own = {"num_experts": num_experts, "moe_intermediate_size": FFN, "intermediate_size": 2 * FFN}
        return transformers.Qwen3MoeConfig(**{**common, **own, **AUX, "norm_topk_prob": True, **overrides})
    if kind == "qwen3_5_moe":
        return transformers.Qwen3_5MoeTextConfig(**{**common, **AUX, **_qwen3_5(num_experts, layers), **overrides})
    if kind == "mixtral":
        own = {"num_local_experts": num_experts, "intermediate_size": FFN}
        return transformers.MixtralConfig(**{**common, **own, **AUX, **overrides})
    if kind == "deepseek_v3":
        return transformers.DeepseekV3Config(**{**common, **_deepseek_v3(num_experts), **overrides})
    if kind == "gpt_oss":
        own = {"num_local_experts": num_experts, "intermediate_size": FFN, "sliding_window": 16}
        return transformers.GptOssConfig(**{**common, **own, **AUX, **overrides})
    raise ValueError(f"kind={kind!r} is none of {FAMILIES}.")


def _qwen3_5(num_experts: int, layers: int) -> dict[str, Any]:
    """Layers=4 gives three linear-attention layers and a full one; fewer layers get one of each kind at least."""
    kinds = ["full_attention" if (i + 1) % 4 == 0 or i + 1 == layers else "linear_attention" for i in range(layers)]
    return {
        "num_experts": num_experts,
        "moe_intermediate_size": FFN,
        "shared_expert_intermediate_size": FFN + 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": kinds,
    }


def _deepseek_v3(num_experts: int) -> dict[str, Any]:
    """A shared expert, a correction bias, no dense layer in front; groups of experts as in the released models."""
    return {
        "n_routed_experts": num_experts,
        "n_shared_experts": 1,
        "moe_intermediate_size": FFN,
        "intermediate_size": 2 * FFN,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 4,
    }


def tiny_model(kind: str, *, dtype: str = "float32", seed: int = 0, **config: Any) -> Any:
    """A whole model of one family with seeded weights; ``config`` as in :func:`tiny_config`.

    Norm weights, biases and correction biases are moved off their constant start, so that a wrong one is seen. Two
    things are made well conditioned for comparisons: norm weights that start at zero (relative distances mean little
    there), and the decay rates of linear attention (as initialised, up to 16, the state forgets everything in one
    token and their own gradients are rounding noise).
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **config), dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name.endswith(("bias", "norm.weight", "layernorm.weight", "sinks")):
                    tensor.add_(0.02 * torch.randn_like(tensor))
                if name.endswith("norm.weight") and abs(float(tensor.mean())) < 0.1:
                    tensor.add_(0.5)  # Qwen3.5's norms scale by 1 + weight
                if name.endswith("A_log"):
                    tensor.uniform_(0.05, 0.5).log_()
    return model.to(getattr(torch, dtype))


def save_tiny(
    kind: str,
    directory: str | Path,
    *,
    num_experts: int = 8,
    top_k: int = 2,
    layers: int = 2,
    dtype: str = "float32",
    seed: int = 0,
    tie: bool = False,
    max_shard_size: str = "5GB",
    favour: dict[int, float] | None = None,
    **overrides: Any,
) -> str:
    """Write a tiny checkpoint with its tokenizer, named as the family's released ones are; returns its path.

    Args:
        kind: one of :data:`FAMILIES`.
        max_shard_size: small ("20KB") gives several files and an index.
        favour: see :func:`steer`.
        overrides: config fields.
    """
    model = tiny_model(
        kind, dtype=dtype, seed=seed, num_experts=num_experts, top_k=top_k, layers=layers, tie=tie, **overrides
    )
    if favour:
        steer(model, favour)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(directory)
    return str(directory)


def steer(model: Any, favour: dict[int, float]) -> None:
    """Make every router favour experts: adds to expert ``e``'s score for every token (large negative: never chosen).

    Through what the family has: a correction bias, a router bias, or (linear routers) an embedding dim that is the
    same for all tokens and that the router reads. In place; the checkpoint saved from it routes so everywhere.
    """
    import torch

    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("e_score_correction_bias", "router.bias")):
                for expert, score in favour.items():
                    tensor[expert] += score
            elif name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight")):
                for expert, score in favour.items():
                    tensor[expert, 0] += score / 2
            elif name.endswith("embed_tokens.weight"):
                tensor[:, 0] = 0.2
