"""Two steps of a ready recipe on CPU ranks: its own file, its layout, its model shrunk; the data are texts of ours."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hf_fsdpturbo.shipped import model_recipes
from tests.families.tiny import tiny_config
from tests.models_recipes.planned import devices_and_memory
from tests.support.spawn import run_ranks
from tests.support.tiny_models import texts, tiny_tokenizer

EXPERTS = 16  # as many as the largest ep_size of the recipes
LENGTH = 32
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def save_shrunk(name: str, folder: Path) -> None:
    """The shipped model, with small sizes and 16 experts, and a small tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_fsdpturbo.plan.shape import read_config

    whole, _ = read_config(name)
    config = tiny_config(type(whole), whole.model_type)
    for field in COUNTS:
        if getattr(config, field, None):
            setattr(config, field, EXPERTS)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def save_rows(kind: str, path: Path) -> None:
    """Texts, or pairs of a better and a worse answer."""
    some = texts(96)
    rows = [{"text": text} for text in some]
    if kind == "dpo":
        rows = [{"prompt": a[:12], "chosen": a[12:], "rejected": b} for a, b in zip(some, some[1:], strict=False)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_recipe(words: list[str], kind: str) -> list[float]:
    """Rank function: the recipe's own parser and steps; the losses of both steps."""
    from hf_fsdpturbo.commands import train
    from hf_fsdpturbo.commands.recipe import parse
    from hf_fsdpturbo.commands.recipe_words import recipe_parser
    from hf_fsdpturbo.trl import FSDPTurboDPOTrainer, FSDPTurboSFTTrainer

    losses: list[float] = []
    base: Any = FSDPTurboDPOTrainer if kind == "dpo" else FSDPTurboSFTTrainer

    class Logged(base):  # type: ignore[misc]
        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            losses.extend(logs[name] for name in ("loss",) if name in logs)
            super().log(logs, *args, **kwargs)

    train.train(Logged, *parse(recipe_parser(kind), words))
    return losses


def two_steps(recipe: str, timeout: int = 540) -> list[float]:
    """The losses of two steps.

    Raises:
        RankError: a rank failed.
        AssertionError: the losses are not two finite numbers, or the first is far from an untrained model's.
    """
    name, _, rest = recipe.partition("/")
    kind = "dpo" if rest.startswith("dpo") else "sft"
    ranks, _ = devices_and_memory(recipe)
    with tempfile.TemporaryDirectory() as folder:
        model, rows = Path(folder, "model"), Path(folder, "rows.jsonl")
        save_shrunk(name, model)
        save_rows(kind, rows)
        words = ["--config", str(model_recipes()[recipe]), "--model_name_or_path", str(model)]
        words += ["--dataset_name", str(rows), "--output_dir", str(Path(folder, "out")), "--max_steps", "2"]
        words += ["--max_length", str(LENGTH), "--gradient_accumulation_steps", "1", "--logging_steps", "1"]
        words += ["--save_strategy", "no", "--report_to", "none", "--use_cpu", "true", "--warmup_steps", "0"]
        losses = run_ranks(train_recipe, ranks, words, kind, timeout=timeout)[0]
    low, high = (0.5, 0.9) if kind == "dpo" else (5.0, 7.0)  # ln 2, ln 384
    assert len(losses) == 2, losses
    assert low < losses[0] < high, losses
    return losses
