"""What an adapter says of itself: its base, and what merging does not take; read before anything heavy is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hf_fsdpturbo.bounded import check_path, cut, parse_json, read_text
from hf_fsdpturbo.checkpoint.inside import check_link, check_links
from hf_fsdpturbo.hub_names import cached_file, is_path, not_here
from hf_fsdpturbo.quantised.methods import method_of, packed_as

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TASKS = (None, "CAUSAL_LM", "SEQ_CLS")
INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base as it was released."""
UNSUPPORTED = {
    "use_dora": "DoRA scales by norms of merged columns",
    "lora_bias": "biases of lora_B are not added",
    "trainable_token_indices": "single rows of an embedding are not replaced",
    "layer_replication": "it makes another model of the base",
    "alora_invocation_tokens": "an activated LoRA acts on some tokens only",
    "use_qalora": "its factors act on pooled inputs",
    "use_bdlora": "its factors are block-diagonal",
    "arrow_config": "it chooses among adapters token by token",
    "kasa_config": "it is not plain LoRA",
    "monteclora_config": "it is not plain LoRA",
    "velora_config": "it is not plain LoRA",
    "megatron_config": "its layers are Megatron's",
}  # fmt: skip
"""Field of LoraConfig -> why it is refused where it is set. A variant of LoRA merges by a formula of its own."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder and its configuration as it is written."""

    folder: str
    config: dict[str, Any]

    @property
    def weights(self) -> str:
        """Path of its tensors."""
        return os.path.join(self.folder, WEIGHTS)


def read_adapter(word: str) -> Adapter:
    """The adapter of ``ADAPTER``: a folder, or a Hub id in the cache.

    Raises:
        ValueError: there is none, or it is of a kind that is not merged; names the field.
    """
    folder = found_folder(word, CONFIG, "ADAPTER")
    check_links(folder)
    path = os.path.join(folder, CONFIG)
    config = parse_json(read_text(path), path)
    if not isinstance(config, dict):
        raise ValueError(f"ADAPTER: {path} must hold a mapping, but it is {cut(config)}. Copy the file again.")
    _check_kind(config, path)
    if not os.path.isfile(os.path.join(folder, WEIGHTS)):
        raise ValueError(f"ADAPTER: {folder} holds no {WEIGHTS}. Save the adapter with safetensors.")
    return Adapter(folder, config)


def _check_kind(config: dict[str, Any], path: str) -> None:
    for field, allowed in (("peft_type", ("LORA",)), ("task_type", TASKS), ("init_lora_weights", INITS)):
        if config.get(field) not in allowed:
            raise ValueError(
                f"ADAPTER: {path}: {field}={cut(config.get(field))}, but merge takes one of {list(allowed)}. Merge it "
                "with PEFT's merge_and_unload."
            )
    if config.get("bias", "none") != "none":
        raise ValueError(f"ADAPTER: {path}: bias={cut(config['bias'])} is not supported by merge: biases are kept.")
    for field, reason in UNSUPPORTED.items():
        if config.get(field):
            raise ValueError(
                f"ADAPTER: {path}: {field}={cut(config[field])} is not supported by merge: {reason}. Merge it with "
                "PEFT's merge_and_unload."
            )


def find_base(adapter: Adapter, given: str | None) -> str:
    """Folder of the base: ``--base``, or what the adapter names; a folder, or a Hub id in the cache.

    Raises:
        ValueError: none is named, or it is not there, or it is quantised in a way that is not read in full.
    """
    named = adapter.config.get("base_model_name_or_path")
    if given is None and (not isinstance(named, str) or not named):
        raise ValueError(f"--base is needed: {adapter.folder}/{CONFIG} names no base_model_name_or_path.")
    revision = adapter.config.get("revision") if given is None else None
    where = "--base" if given is not None else f"--base is needed: {CONFIG} names a base that is not here;"
    folder = found_folder(given or str(named), "config.json", where, revision)
    check_links(folder)
    path = os.path.join(folder, "config.json")
    config = parse_json(read_text(path), path)
    if isinstance(config, dict):
        _refuse_packed(config, f"--base: {path}")
    return folder


def _refuse_packed(config: dict[str, Any], what: str) -> None:
    """Refuse a base whose weights are packed in a way that has no values in full here.

    Raises:
        ValueError: names ``quant_method``, rule, fix.
    """
    quantised = config.get("quantization_config")
    if quantised and method_of(quantised) == "bitsandbytes":
        raise ValueError(
            f"{what} is of weights that bitsandbytes has quantised (quantization_config). Give the release that they "
            "were made of, with --load_in_4bit to merge into what 4 bits leave of it."
        )
    packed_as(config, what)


def found_folder(word: str, file: str, argument: str, revision: Any = None) -> str:
    """The folder with ``file``: ``word`` itself, or its snapshot in the Hub's cache.

    Raises:
        ValueError: there is none; begins with ``argument``.
    """
    check_path(argument, word)
    if os.path.isdir(word):
        if not os.path.isfile(os.path.join(word, file)):
            raise ValueError(f"{argument} {cut(word)} is a folder without {file}. Correct the path.")
        check_link(word, os.path.join(word, file))
        return word
    found = None if is_path(word) else cached_file(word, file, revision)
    if found is None:
        raise ValueError(not_here(argument, word, "folder, nor a Hub id in the cache"))
    return os.path.dirname(found)
