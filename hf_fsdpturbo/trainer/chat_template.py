"""``chat_template_path`` of another model, in a sharded run: its template and end token, without new rows.

TRL's ``clone_chat_template`` also resizes the embeddings, to a multiple of 64 even where no token is new; by then they
are sharded. A template that brings tokens of its own is refused before the model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hf_fsdpturbo.ranks import raised_on_every_rank
from hf_fsdpturbo.trainer.given_arguments import GivenArguments


def refuse_new_tokens(given: GivenArguments, config: Any) -> None:
    """Compare the tokenizer of ``chat_template_path`` with the model's.

    Raises:
        ValueError: it has tokens that the model's tokenizer lacks, or it cannot be read; on every rank.
    """
    path, model = getattr(config, "chat_template_path", None), given.get("model")
    if path is None or _is_file(path):
        return
    with raised_on_every_rank(f"reading chat_template_path={path!r}"):
        tokenizer = given.get("processing_class")
        if tokenizer is None:
            name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
            revision = (getattr(config, "model_init_kwargs", None) or {}).get("revision")
            tokenizer = AutoTokenizer.from_pretrained(name, **({"revision": revision} if revision else {}))
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
        source = AutoTokenizer.from_pretrained(path)
        new = [token.content for token in source.added_tokens_decoder.values() if token.content not in tokenizer.vocab]
        if new:
            raise ValueError(
                f"chat_template_path={path!r} adds tokens that the model's tokenizer lacks ({new[:5]}), for which TRL "
                "resizes the embeddings of the model, which is sharded by then. Add them to the checkpoint first, or "
                "save the template alone in a .jinja file."
            )


def take_template(model: Any, tokenizer: Any, source_tokenizer_path: str, **kwargs: Any) -> Any:
    """In place of TRL's ``clone_chat_template`` (1.16): the same, but the embeddings stay as they are.

    Returns:
        model, tokenizer, and no added tokens.
    """
    source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    tokenizer.chat_template, tokenizer.eos_token = source.get_chat_template(), source.eos_token
    model.config.get_text_config().eos_token_id = tokenizer.eos_token_id
    if model.can_generate():
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer, []


def _is_file(path: str) -> bool:
    return Path(path).suffix in (".jinja", ".j2") and Path(path).is_file()
