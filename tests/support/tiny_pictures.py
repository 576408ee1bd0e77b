"""A tiny Qwen3-VL-MoE with its processor, and data sets of coloured pictures: what image runs train on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.tiny_models import HEAD_DIM, HIDDEN, TOKENS, VOCAB_SIZE, texts, tiny_tokenizer

sys.path.append(str(Path(__file__).parents[2] / "demo"))
from picture_processor import END, IMAGE, PATCH, START, VIDEO, make_processor  # noqa: E402

FFN, VISION = 16, 24


def save_tiny_vision(directory: str | Path, **text: Any) -> str:
    """Write a seeded float32 model and its processor; ``text`` are fields of the text config. Returns the path."""
    import torch
    import transformers

    processor = make_processor(tiny_tokenizer())
    tokenizer = processor.tokenizer
    config = transformers.Qwen3VLMoeConfig(
        text_config={
            "vocab_size": VOCAB_SIZE + 8, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": HEAD_DIM, "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": FFN, "intermediate_size": 2 * FFN, "max_position_embeddings": 512,
            "initializer_range": 0.02, "router_aux_loss_coef": 0.05, **TOKENS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}, **text,
        },
        vision_config={
            "depth": 2, "hidden_size": VISION, "intermediate_size": 2 * VISION, "num_heads": 3, "patch_size": PATCH,
            "out_hidden_size": HIDDEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
            "initializer_range": 0.02,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE), video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(END),
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.Qwen3VLMoeForConditionalGeneration(config).float()
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if name.endswith(("bias", "norm.weight", "layernorm.weight", "norm1.weight", "norm2.weight")):
                    tensor.add_(0.02 * torch.randn_like(tensor))
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return str(directory)


def picture(seed: int) -> Any:
    """A PIL image of noise; sides of two or four tokens."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(seed)
    height, width = draw.choice([2 * 2 * PATCH, 4 * PATCH, 4 * 2 * PATCH], 2) // 2
    return Image.fromarray(draw.integers(0, 255, (int(height), int(width), 3), dtype=numpy.uint8))


def picture_rows(numbers: Sequence[int], preferences: bool = False) -> dict[str, list[Any]]:
    """Columns ``images`` and ``messages`` (or ``prompt``, ``chosen``, ``rejected``); a row has that many images."""
    words = iter(texts(3 * len(numbers), shortest=10, longest=60))
    rows: dict[str, list[Any]] = {"images": [[picture(100 * i + j) for j in range(n)] for i, n in enumerate(numbers)]}

    def say(role: str) -> list[dict[str, str]]:
        return [{"role": role, "content": next(words)}]

    if preferences:
        return rows | {
            "prompt": [say("user") for _ in numbers],
            "chosen": [say("assistant") for _ in numbers],
            "rejected": [say("assistant") for _ in numbers],
        }
    return rows | {"messages": [say("user") + say("assistant") for _ in numbers]}


def save_pictures(directory: str | Path, numbers: Sequence[int], preferences: bool = False) -> str:
    """Write a ``datasets.Dataset`` of :func:`picture_rows`; returns the path."""
    from datasets import Dataset, Features, Image, List, Value

    message = List({"role": Value("string"), "content": Value("string")})
    rows = picture_rows(numbers, preferences)
    features = {name: List(Image()) if name == "images" else message for name in rows}
    Dataset.from_dict(rows, features=Features(features)).save_to_disk(str(directory))
    return str(directory)
