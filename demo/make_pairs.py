"""Makes what the preference demos train on and with: pairs of real text, a tokenizer, an untrained model.

The prompt names a topic of the Python language reference, the chosen answer is a passage of its explanation, the
rejected one the same words in another order: only the order tells them apart, and a small model learns it from nothing
in two minutes. Passages of the test pairs are in no training pair.

    python demo/make_pairs.py outputs/demo_dpo        writes outputs/demo_dpo/{data,base_model}
"""

import random
import sys
from pathlib import Path

from make_inputs import passages, train_tokenizer, untrained_model, write_data

PASSAGE_CHARS = 250
NUM_TEST = 96
PER_TOPIC = 24  # passages of one topic at most: a few topics are ten times longer than the rest


def pairs() -> list[dict[str, str]]:
    """Rows prompt, chosen, rejected in TRL's format; the first ones, for testing, share no passage with the others."""
    draw = random.Random(1)
    topics: dict[str, list[str]] = {}
    for row in passages(PASSAGE_CHARS):
        topics.setdefault(row["prompt"], []).append(row["completion"])
    rows = []
    for prompt, texts in topics.items():
        for text in texts[:PER_TOPIC]:
            words = text.split()
            shuffled = draw.sample(words, len(words))
            rows.append(
                {"prompt": prompt, "chosen": "\n\n" + " ".join(words), "rejected": "\n\n" + " ".join(shuffled)}
            )
    draw.shuffle(rows)
    return rows


def main(out: Path) -> None:
    rows = pairs()
    write_data(out / "data", rows, NUM_TEST)
    tokenizer = train_tokenizer(passages())
    tokenizer.save_pretrained(out / "base_model")
    untrained_model(tokenizer).save_pretrained(out / "base_model")
    print(f"{len(rows)} pairs of {len({row['prompt'] for row in rows})} topics -> {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
