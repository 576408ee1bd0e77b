"""Issue 14, item 6: what used to be refused, or crashed: named by what it is, or taken."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_fsdpturbo import FSDPTurboRewardTrainer, FSDPTurboTrainer
from hf_fsdpturbo.parallelize.build import Adapter
from hf_fsdpturbo.parallelize.trainer_family import model_loader
from hf_fsdpturbo.trainer.chat_template import refuse_new_tokens, take_template


def dense() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=384, **sizes))


def test_a_peft_model_with_another_adapter_is_named():
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(dense(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="adapter 'default' whose peft_type is PROMPT_TUNING.*only LORA.*one process"):
        Adapter(None, tuned)
    Adapter(None, peft.get_peft_model(dense(), peft.LoraConfig(target_modules=["q_proj"])))


def tokenizer(folder: Path, extra: list[str] | None = None) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1, "<end>": 2, "<other end>": 3}, unk_token="<unk>"))
    made = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<other end>" if extra is None else "<end>")
    made.add_tokens(extra or [])
    made.chat_template = "{{ messages }}"
    made.save_pretrained(folder)
    return str(folder)


def test_a_chat_template_that_adds_no_tokens_is_taken(tmp_path):
    from transformers import AutoTokenizer

    own, same, more = (tokenizer(tmp_path / n, e) for n, e in (("own", []), ("same", None), ("more", ["<tool>"])))
    given: Any = {"model": own}
    refuse_new_tokens(given, SimpleNamespace(chat_template_path=same))
    refuse_new_tokens(given, SimpleNamespace(chat_template_path=None))
    with pytest.raises(ValueError, match=r"chat_template_path=.*more' adds tokens .*<tool>.*\.jinja"):
        refuse_new_tokens(given, SimpleNamespace(chat_template_path=more))
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    refuse_new_tokens(given, SimpleNamespace(chat_template_path=str(tmp_path / "chat.jinja")))
    model, mine = dense(), AutoTokenizer.from_pretrained(own)
    rows = model.get_input_embeddings().weight.shape[0]
    assert take_template(model, mine, same, resize_to_multiple_of=64) == (model, mine, [])
    assert (mine.eos_token, model.config.eos_token_id, model.generation_config.eos_token_id) == ("<other end>", 3, 3)
    assert model.get_input_embeddings().weight.shape[0] == rows


@pytest.mark.parametrize(
    ("architecture", "loader"),
    [
        ("Qwen3MoeForSequenceClassification", "AutoModelForSequenceClassification"),
        ("Qwen3MoeForTokenClassification", "AutoModelForTokenClassification"),
        ("Qwen3MoeForCausalLM", "AutoModelForCausalLM"),
    ],
)
def test_a_classifier_by_path_is_loaded_as_one(tmp_path, architecture: str, loader: str):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "architectures": [architecture]}))
    config: Any = SimpleNamespace(model_init_kwargs=None)
    build, _ = model_loader(FSDPTurboTrainer, config, {}, str(tmp_path))
    assert build.__self__.__name__ == loader
    _, kwargs = model_loader(FSDPTurboRewardTrainer, config, {}, str(tmp_path))
    assert kwargs["num_labels"] == 1
