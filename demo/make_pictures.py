"""Makes what the picture demo trains on and with: drawn shapes with their names, sums, an untrained Qwen3-VL-MoE.

A picture shows one shape in one colour, of any size, at any place, on a noisy ground; the question is always the same,
the answer is the colour and the shape. A third of the rows have no picture: sums of two digits. Everything is seeded;
pictures for testing are drawn anew.

    python demo/make_pictures.py outputs/demo_vl        writes outputs/demo_vl/{train,test,base_model}
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from datasets import Dataset, Features, Image, List, Value
from make_inputs import train_tokenizer
from picture_processor import END, IMAGE, PATCH, START, VIDEO, make_processor
from PIL import Image as Pictures
from PIL import ImageDraw
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

SIDE = 48  # pixels: nine tokens
COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (230, 210, 40),
    "purple": (150, 50, 180), "white": (245, 245, 245),
}  # fmt: skip
SHAPES = ("dot", "square", "bar", "post")
QUESTION = "What is it?"
NUM_TRAIN, NUM_TEST = 3000, 120


def draw_picture(draw: random.Random, colour: str, shape: str) -> Pictures.Image:
    ground = numpy.random.default_rng(draw.randrange(2**32)).integers(0, 90, (SIDE, SIDE, 3), dtype=numpy.uint8)
    picture = Pictures.fromarray(ground)
    long, short = draw.randint(28, 36), draw.randint(8, 12)
    width, height = {"dot": (short, short), "square": (long, long), "bar": (long, short), "post": (short, long)}[shape]
    x, y = draw.randint(2, SIDE - width - 2), draw.randint(2, SIDE - height - 2)
    fill = tuple(max(0, min(255, c + draw.randint(-20, 20))) for c in COLOURS[colour])
    pen = ImageDraw.Draw(picture)
    (pen.ellipse if shape == "dot" else pen.rectangle)((x, y, x + width, y + height), fill)
    return picture


def say(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def rows(number: int, seed: int) -> list[dict[str, Any]]:
    """Rows of TRL's prompt-completion format for images: ``images`` is empty where there is none."""
    draw = random.Random(seed)
    found = []
    for _ in range(number):
        if draw.random() < 1 / 3:
            a, b = draw.randint(0, 9), draw.randint(0, 9)
            question, answer, images = f"What is {a} + {b}?", str(a + b), []
        else:
            colour, shape = draw.choice(sorted(COLOURS)), draw.choice(SHAPES)
            question, answer, images = QUESTION, f"{colour} {shape}", [draw_picture(draw, colour, shape)]
        found.append({"images": images, "prompt": say("user", question), "completion": say("assistant", answer)})
    return found


def as_dataset(found: list[dict[str, Any]]) -> Dataset:
    message = List({"role": Value("string"), "content": Value("string")})
    return Dataset.from_list(found, features=Features(images=List(Image()), prompt=message, completion=message))


def untrained_model(tokenizer: Any) -> Qwen3VLMoeForConditionalGeneration:
    torch.manual_seed(0)
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3VLMoeConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 24, "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 96, "intermediate_size": 192, "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
            "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 2, "hidden_size": 96, "intermediate_size": 192, "num_heads": 4, "patch_size": PATCH,
            "out_hidden_size": 96, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
        image_token_id=ids(IMAGE), video_token_id=ids(VIDEO), vision_start_token_id=ids(START),
        vision_end_token_id=ids(END),
    )  # fmt: skip
    return Qwen3VLMoeForConditionalGeneration(config)


def main(out: Path) -> None:
    train, test = rows(NUM_TRAIN, 1), rows(NUM_TEST, 2)
    as_dataset(train).save_to_disk(str(out / "train"))
    as_dataset(test).save_to_disk(str(out / "test"))
    texts = [{"prompt": row["prompt"][0]["content"], "completion": row["completion"][0]["content"]} for row in train]
    texts.append({"prompt": "user: assistant: ", "completion": ""})
    processor = make_processor(train_tokenizer(texts), SIDE)
    processor.save_pretrained(out / "base_model")
    model = untrained_model(processor.tokenizer)
    model.save_pretrained(out / "base_model")
    pictures = sum(bool(row["images"]) for row in train)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{pictures} pictures and {NUM_TRAIN - pictures} sums to learn from, {millions:.1f} M parameters -> {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
