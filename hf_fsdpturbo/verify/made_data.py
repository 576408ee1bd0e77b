"""What a proof trains on, by command: drawn token ids, or pairs of them; and a batch's loss without a trainer."""

from __future__ import annotations

import random
from typing import Any

from hf_fsdpturbo.verify.recording import Batch
from hf_fsdpturbo.verify.shrunk_config import LAST_IDS, SPECIAL, VOCAB

ROWS, SHORTEST, LONGEST = 2, 8, 40
FIRST_ID = len(SPECIAL)  # then comes the tokenizer's unknown word, which is as good as any
PROMPT = 12  # of a preference row's tokens, at most


def columns(command: str, number: int) -> dict[str, list[Any]]:
    """Columns of a data set with ``number`` rows of uneven lengths, as TRL's trainer of ``command`` takes them."""
    if command == "sft":
        return {"input_ids": samples(number)}
    if command == "reward":
        return {"chosen_ids": samples(number), "rejected_ids": samples(number, seed=4)}
    prompts = samples(number, seed=5, longest=PROMPT)
    answers = {"chosen": samples(number), "rejected": samples(number, seed=4)}
    # The tokenizer of small_model.py has a word for each id; TRL's trainer takes text only.
    short = {name: [in_words(row[: LONGEST - PROMPT]) for row in rows] for name, rows in answers.items()}
    return {"prompt": [f"{in_words(prompt)} " for prompt in prompts], **short}


def samples(number: int, seed: int = 3, longest: int = LONGEST) -> list[list[int]]:
    """Token ids of uneven lengths, drawn; those of pads, images and the like are left out."""
    draw = random.Random(seed)
    lengths = [draw.randint(SHORTEST, longest) for _ in range(number)]
    return [[draw.randrange(FIRST_ID, VOCAB - LAST_IDS) for _ in range(length)] for length in lengths]


def in_words(ids: list[int]) -> str:
    """Text that the small tokenizer reads as these ids."""
    return " ".join(f"w{index}" for index in ids)


def loss_of(model: Any, batch: Batch) -> float:
    """A loss of a micro-batch that any reader of the weights can compute.

    Of a language model: mean cross entropy of next tokens, without router losses (whether those are asked for is
    TRL's). Of a reward model: ``-log sigmoid(chosen - rejected)``, the halves of the batch.

    Args:
        batch: ``input_ids``, with padding ``attention_mask``, of SFT ``labels``; each ``[rows, length]``.
    """
    import torch
    from torch.nn import functional

    device = next(model.parameters()).device
    inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask") if name in batch}
    with torch.no_grad():
        logits = model.eval()(**inputs, use_cache=False).logits.float()
    if logits.shape[-1] == 1:
        chosen, rejected = logits.flatten().chunk(2)
        return float(-functional.logsigmoid(chosen - rejected).mean())
    targets = batch.get("labels")
    if targets is None:
        targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].to(device).flatten()))
