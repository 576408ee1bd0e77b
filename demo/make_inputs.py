"""Makes what the demo trains on and with, from nothing and without a network: text, tokenizer, untrained model.

The text is the Python language reference that ships inside the standard library (`pydoc_data.topics`: topic ->
explanation), cut into passages at paragraph ends. The tokenizer is a byte-level BPE trained on that text. The model is
a small Qwen3-MoE with random weights (std 0.02). Everything is seeded: two runs write the same files.

    python demo/make_inputs.py outputs/demo        writes outputs/demo/{data,base_model}
"""

import json
import random
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB_SIZE = 2048
PASSAGE_CHARS = 700
NUM_TEST = 32


def passages(chars: int = PASSAGE_CHARS) -> list[dict[str, str]]:
    """Prompt-completion rows in TRL's format: the prompt names the topic, the completion is a passage about it.

    The blank line between them belongs to the completion: no token reaches over the boundary then.
    """
    rows = []
    for topic, text in topics.items():
        passage = ""
        for paragraph in [*text.strip().split("\n\n"), None]:
            if passage and (paragraph is None or len(passage) + len(paragraph) > chars):
                rows.append({"prompt": f"# {topic}", "completion": f"\n\n{passage}"})
                passage = ""
            if paragraph is not None:
                passage += ("\n\n" if passage else "") + paragraph
    random.Random(0).shuffle(rows)
    return rows


def write_data(directory: Path, rows: list[dict[str, str]], num_test: int = NUM_TEST) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for split, part in (("test", rows[:num_test]), ("train", rows[num_test:])):
        lines = [json.dumps(row) + "\n" for row in part]
        (directory / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def train_tokenizer(rows: list[dict[str, str]]) -> PreTrainedTokenizerFast:
    """PreTrainedTokenizerFast by name: AutoTokenizer would guess a class that does not know this vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>")


def untrained_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3MoeForCausalLM(config)


def main(out: Path) -> None:
    rows = passages()
    write_data(out / "data", rows)
    tokenizer = train_tokenizer(rows)
    tokenizer.save_pretrained(out / "base_model")
    model = untrained_model(tokenizer)
    model.save_pretrained(out / "base_model")
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{len(rows)} passages, {len(tokenizer)} tokens in the vocabulary, {millions:.1f} M parameters -> {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
