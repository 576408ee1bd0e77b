"""Stand-ins for the models and data sets that peers' tests load from the Hub: folders of the same names.

The tests run with their parent folder as the working directory, where ``from_pretrained`` and ``load_dataset`` take a
Hub id for a relative path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.tiny_models import TOKENS, VOCAB_SIZE, tiny_config, tiny_tokenizer

OWNER = "trl-internal-testing"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    **TOKENS,
}
DENSE = {
    "tiny-Qwen2ForCausalLM-2.5": "Qwen2",
    "tiny-Qwen3ForCausalLM": "Qwen3",
    "tiny-LlamaForCausalLM-3.2": "Llama",
    "tiny-LlamaForCausalLM-3.1": "Llama",
    "tiny-LlamaForCausalLM-3": "Llama",
    "tiny-MistralForCausalLM-0.2": "Mistral",
    "tiny-MistralForCausalLM-0.1": "Mistral",
    "tiny-CohereForCausalLM": "Cohere",
    "tiny-GPTNeoXForCausalLM": "GPTNeoX",
}
EXPERTS = {"tiny-Qwen3MoeForCausalLM": "qwen3_moe", "tiny-GptOssForCausalLM": "gpt_oss"}
OF_TRANSFORMERS = {
    "hf-internal-testing/tiny-random-LlamaForCausalLM": "LlamaForCausalLM",
    "openai-community/gpt2": "GPT2LMHeadModel",
    "bert-base-cased": "BertForSequenceClassification",
}
"""What Transformers' trainer tests load, by the class that is saved there."""
CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\n' }}"
    "{% endgeneration %}{%- else %}{{ message['content'] + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
LINES = [
    ("Beautiful is better than", " ugly."),
    ("Explicit is better than", " implicit."),
    ("Flat is better", " than nested."),
]


def make(folder: Path) -> None:
    """Write all of them into ``folder``."""
    import transformers

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.model_max_length = 512
    for name, family in DENSE.items():
        config = getattr(transformers, f"{family}Config")(**SIZES)
        _save(getattr(transformers, f"{family}ForCausalLM")(config), tokenizer, folder / OWNER / name)
    for name, family in EXPERTS.items():
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(family))
        _save(model, tokenizer, folder / OWNER / name)
    classifier = transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**SIZES, num_labels=1))
    _save(classifier, tokenizer, folder / OWNER / "tiny-Qwen2ForSequenceClassification-2.5")
    _zen(folder / OWNER / "zen")
    for name, kind in OF_TRANSFORMERS.items():
        model_class = getattr(transformers, kind)
        _save(model_class(model_class.config_class(**SIZES)), tokenizer, folder / name)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _zen(folder: Path) -> None:
    """TRL's small data set, in the configurations that its tests name."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for prompt, end in LINES * 6:
        other = " nothing."
        user, good, bad = (
            [{"role": role, "content": text}]
            for role, text in (("user", prompt), ("assistant", end), ("assistant", other))
        )
        for kind, p, c, r in (("standard", prompt, end, other), ("conversational", user, good, bad)):
            text = {"text": prompt + end} if kind == "standard" else {"messages": user + good}
            for name, row in {
                "language_modeling": text,
                "prompt_only": {"prompt": p},
                "prompt_completion": {"prompt": p, "completion": c},
                "preference": {"prompt": p, "chosen": c, "rejected": r},
                "implicit_prompt_preference": {"chosen": p + c, "rejected": p + r},
                "unpaired_preference": {"prompt": p, "completion": c, "label": True},
            }.items():
                rows.setdefault(f"{kind}_{name}", []).append(row)
    described = ["---", "configs:"]
    for name, content in rows.items():
        described += [f"- config_name: {name}", "  data_files:"]
        for split, part in (("train", content[:15]), ("test", content[15:])):
            path = folder / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
            described += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*described, "---", ""]), encoding="utf-8")
