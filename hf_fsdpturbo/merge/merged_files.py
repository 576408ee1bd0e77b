"""Merging, in order: the model on meta, the adapter's plan, the base's files, then weights, config, tokenizer."""

from __future__ import annotations

import json
import os
from typing import Any, cast

import torch
from torch import Tensor

from hf_fsdpturbo.bounded import parse_json, read_text
from hf_fsdpturbo.checkpoint.beside import copy_beside
from hf_fsdpturbo.checkpoint.hub import export_tensors, saved_tensors
from hf_fsdpturbo.loading.files import checked_folder, safetensors_header
from hf_fsdpturbo.loading.unused_keys import settle_unused
from hf_fsdpturbo.lora.adapter import hide
from hf_fsdpturbo.merge.adapter_config import Adapter
from hf_fsdpturbo.merge.adapter_plan import Update, plan_of
from hf_fsdpturbo.merge.base_model import model_on_meta
from hf_fsdpturbo.merge.base_weights import BaseWeights
from hf_fsdpturbo.merge.four_bit_base import FourBitBase, chosen
from hf_fsdpturbo.merge.merged_rows import MergedRows
from hf_fsdpturbo.quantised.asked import FourBit

CONFIG = "config.json"


def merge(adapter: Adapter, base: str, out: str, max_file_bytes: int, four_bit: FourBit | None = None) -> list[str]:
    """Write the merged model into ``out``; names of its weight files.

    Args:
        adapter: of :func:`read_adapter`.
        base: folder of :func:`find_base`.
        out: new or empty folder.
        max_file_bytes: size at which a new weight file begins.
        four_bit: merge into what these 4 bits leave of the base, as a QLoRA run has it; None: into the base itself.

    Raises:
        ValueError: adapter and base do not fit, or a file is damaged; names file and key.
        OSError: ``out`` cannot be written.
    """
    from safetensors import safe_open

    shapes = {key: tuple(entry["shape"]) for key, entry in safetensors_header(adapter.weights).items()}
    headers = checked_folder(base)
    if not headers:
        raise ValueError(f"--base {base} holds no safetensors weights. Give a release that has them.")
    model = model_on_meta(adapter, base, shapes)
    quantised = chosen(model, four_bit) if four_bit is not None else frozenset()
    plan = plan_of(model, adapter, shapes)
    hide(model)
    weights = BaseWeights(model, base, headers, {name for name, update in plan.items() if update.whole})
    with safe_open(adapter.weights, framework="pt") as file:
        tensors = _tensors(model, weights, plan, file)
        is_classifier = adapter.config.get("task_type") == "SEQ_CLS"
        settle_unused(base, model, base, headers, weights.unknown, fresh_head=is_classifier, drop=False)
        os.makedirs(out, exist_ok=True)
        seen = weights if four_bit is None else FourBitBase(weights, quantised, four_bit)
        names = export_tensors(model, MergedRows(tensors, seen, plan, file), out, max_file_bytes)
    weights.files.close()
    _write_config(model, base, out)
    copy_beside(base, adapter.folder, out)
    return names


def _tensors(model: Any, base: BaseWeights, plan: dict[str, Update], file: Any) -> dict[str, Tensor]:
    """What is written, on meta; a parameter has the dtype of the base's files, one that they lack the usual of those.

    Raises:
        ValueError: the base lacks a tensor, or an update is of a tied one.
    """
    wanted = saved_tensors(model)
    _check_tied(model, wanted, plan, file)
    lacking = [name for name in wanted if name not in base and not plan.get(name, Update()).whole]
    if lacking:
        raise ValueError(f"--base lacks {lacking[0]} and {len(lacking) - 1} more. Copy the whole checkpoint.")
    usual = base.dtype(next(name for name, tensor in wanted.items() if name in base and tensor.is_floating_point()))
    own = base.all_dtypes()
    return {n: torch.empty(t.shape, dtype=own.get(n, usual), device="meta") for n, t in wanted.items()}


def _check_tied(model: Any, wanted: dict[str, Tensor], plan: dict[str, Update], file: Any) -> None:
    """Updates of tied weights: only equal copies of both are one weight afterwards.

    Raises:
        ValueError: the merged model could not be tied; names both.
    """
    for copy, original in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if copy in wanted or original not in wanted:
            continue
        ours, theirs = plan.get(copy, Update()), plan.get(original, Update())
        both = ours.whole is not None and theirs.whole is not None
        if ours.factors or theirs.factors or (ours.whole is None) is not (theirs.whole is None):
            raise ValueError(
                f"ADAPTER: {copy} and {original} of the base are one (tie_word_embeddings), and the adapter changes "
                "them apart: no merged checkpoint can say that. Untie the base, or serve the adapter beside it."
            )
        if both and not torch.equal(file.get_tensor(cast(str, ours.whole)), file.get_tensor(cast(str, theirs.whole))):
            raise ValueError(f"ADAPTER: {ours.whole} and {theirs.whole} differ, but the base has them tied. Untie it.")


def _write_config(model: Any, base: str, out: str) -> None:
    """The base's ``config.json`` as it is written, but for the vocabulary's size and a classifier's labels.

    Weights that were packed are no longer, so it does not say how.
    """
    path = os.path.join(base, CONFIG)
    content = parse_json(read_text(path), path)
    text, changed = model.config.get_text_config(), model.config.to_dict()
    for block in (content, content.get("text_config")):
        if isinstance(block, dict):
            block.pop("quantization_config", None)
            block |= {"vocab_size": text.vocab_size} if "vocab_size" in block else {}
    if "SequenceClassification" in type(model).__name__:
        content["architectures"] = [type(model).__name__]
        content |= {name: changed[name] for name in ("id2label", "label2id") if name in changed}
    with open(os.path.join(out, CONFIG), "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
