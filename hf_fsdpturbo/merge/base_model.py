"""The base's model class on meta: the one whose modules an adapter's tensors name, with its vocabulary and head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hf_fsdpturbo.merge.adapter_config import Adapter
from hf_fsdpturbo.merge.adapter_plan import PREFIX, saved_embeddings

SCORE = f"{PREFIX}score.weight"


def model_on_meta(adapter: Adapter, base: str, shapes: dict[str, tuple[int, ...]]) -> Any:
    """The model that the adapter was trained on.

    Args:
        adapter: as it is written.
        base: folder of the base.
        shapes: of the adapter's file, by key.

    Raises:
        ValueError: Transformers has no class for the base, or the adapter is of another model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        text = " ".join(str(error).split())[:200]
        raise ValueError(
            f"--base {base}: Transformers cannot read its config ({text}). merge runs no code of it."
        ) from error
    named = {_module_of(key) for key in shapes}
    tried = []
    for build in _classes(adapter, config, shapes):
        try:
            model = _on_meta(build, config)
        except (ValueError, KeyError):  # no class of this task for the family
            continue
        tried.append(type(model).__name__)
        if named <= {name for name, _ in model.named_modules()}:
            return _resized(build, config, model, shapes)
    odd = sorted(named - {name for name, _ in model.named_modules()})[0] if tried else "all"
    raise ValueError(
        f"ADAPTER {adapter.folder} is not of {base}: {' and '.join(tried) or config.model_type} has no {odd}. Give "
        "the base that it was trained on (--base)."
    )


def _module_of(key: str) -> str:
    """The base's module that a tensor of the file belongs to: the names of PEFT's wrappers are left out."""
    parts = [part for part in key.removeprefix(PREFIX).split(".") if part != "base_layer"]
    lora = next((place for place, part in enumerate(parts) if part.startswith("lora_")), len(parts) - 1)
    return ".".join(parts[:lora])


def _classes(adapter: Adapter, config: Any, shapes: dict[str, tuple[int, ...]]) -> Iterator[Any]:
    """Classes to try, that of the release first."""
    import transformers

    if adapter.config.get("task_type") == "SEQ_CLS":
        if SCORE in shapes:
            config.num_labels = shapes[SCORE][0]
        yield transformers.AutoModelForSequenceClassification
        return
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            yield found
    yield transformers.AutoModelForCausalLM


def _on_meta(build: Any, config: Any) -> Any:
    with torch.device("meta"):
        return build.from_config(config) if hasattr(build, "from_config") else build(config)


def _resized(build: Any, config: Any, model: Any, shapes: dict[str, tuple[int, ...]]) -> Any:
    """The model with the vocabulary of the embeddings that the adapter's file holds."""
    embedding = model.get_input_embeddings()
    key = saved_embeddings(model, shapes).get(f"{_name_of(model, embedding)}.weight")
    if key is None or shapes[key][0] == embedding.weight.shape[0]:
        return model
    config.get_text_config().vocab_size = shapes[key][0]
    return _on_meta(build, config)


def _name_of(model: Any, module: Any) -> str:
    return next(name for name, found in model.named_modules() if found is module)
