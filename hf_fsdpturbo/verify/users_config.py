"""The user's model as its config says: read from where it lies, and refused where there is nothing to prove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_fsdpturbo.bounded import parse_json, read_text
from hf_fsdpturbo.hub_names import cached_file, is_path, not_here
from hf_fsdpturbo.plan.released import released_file

EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
REFUSALS = (ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError, ZeroDivisionError)
"""What configs and model classes raise for sizes that do not go together."""


def read_values(model: str) -> dict[str, Any]:
    """``config.json`` as it is, without Transformers: of a shipped name, a file, a folder or a Hub id in the cache.

    Raises:
        ValueError: ``MODEL`` is none of these.
    """
    path = released_file(model) or Path(model)
    if path.is_dir():
        path = path / "config.json"
    elif not path.is_file() and not is_path(model) and (found := cached_file(model, "config.json")):
        path = Path(found)
    if not path.is_file():
        kinds = "shipped name (hf-fsdpturbo plan --help), config.json, folder with one, or Hub id in the cache"
        raise ValueError(not_here("MODEL", model, kinds))
    values = parse_json(read_text(str(path)), str(path))
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ValueError(f"MODEL {model!r}: {path} holds no model_type. Give the config.json of a model.")
    return values


def check_experts(values: dict[str, Any], model: str, ep_size: int) -> None:
    """What the numbers of a ``config.json`` say: there are experts, and ``ep_size`` divides them.

    Experts that the file leaves to the class's default are looked at later, in the config that Transformers makes.

    Raises:
        ValueError: naming ``ep_size`` or ``MODEL``.
    """
    counts = {name: v for name, v in _text_values(values).items() if name in EXPERT_FIELDS and isinstance(v, int)}
    for name, count in counts.items():
        if count > 1 and count % ep_size:
            raise ValueError(
                f"ep_size ({ep_size}) must divide {name} ({count}) of MODEL {model}. Choose an ep_size that does."
            )


def _text_values(values: dict[str, Any]) -> dict[str, Any]:
    text = values.get("text_config")
    return {**values, **text} if isinstance(text, dict) else values


def read_config(values: dict[str, Any], model: str) -> Any:
    """The config of Transformers.

    Raises:
        ValueError: Transformers does not know the model type, or refuses its values.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    rest = {name: value for name, value in values.items() if name not in ("model_type", "quantization_config")}
    try:
        return AutoConfig.for_model(values["model_type"], **rest)
    except (*REFUSALS, StrictDataclassError) as error:
        raise ValueError(f"MODEL {model!r}: Transformers makes no config of it ({short(error)}).") from None


def short(error: BaseException) -> str:
    """Its kind, and the beginning of its first line."""
    text = (str(error).strip() or repr(error)).splitlines()[0]
    return f"{type(error).__name__}: {text[:160]}"


def first_of(config: Any, names: tuple[str, ...], default: int) -> int:
    """The first of these fields that holds a number above 0, or a list of them (the largest counts)."""
    found = (getattr(config, name, None) for name in names)
    return next((_largest(value) for value in found if _largest(value) > 0), default)


def check_has_experts(config: Any, model: str) -> None:
    """Raise ValueError for a config without experts: nothing is built for it."""
    if not any(first_of(one, EXPERT_FIELDS, 0) for one in _with_subs(config)):
        raise ValueError(f"MODEL {model!r} ({config.model_type}) has no MoE layers, and verify is for MoE models.")


def _with_subs(config: Any) -> list[Any]:
    subs = [value for value in vars(config).values() if hasattr(value, "model_type") and hasattr(value, "to_dict")]
    return [config, *(inner for sub in subs for inner in _with_subs(sub))]


def _largest(value: Any) -> int:
    """The number, or the largest of a list of them; 0 for anything else."""
    numbers = value if isinstance(value, (list, tuple)) else [value]
    return max((n for n in numbers if isinstance(n, int) and not isinstance(n, bool)), default=0)


def architecture(config: Any, command: str = "sft") -> str:
    """Name of the class that is trained: what the config names, or the causal language model of its type.

    Args:
        config: the user's.
        command: ``reward`` trains the sequence classification of its type.

    Raises:
        ValueError: Transformers has none.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    tables = ["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"]
    what, named = "causal language model", next(iter(config.architectures or ()), None)
    if command == "reward":
        what, named, tables = "reward model", None, ["MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"]
    if named is None:
        for table in tables if config.get_text_config() is config else reversed(tables):
            named = named or getattr(modeling_auto, table).get(config.model_type)
    named = named[0] if isinstance(named, tuple) else named
    if named is None or not hasattr(transformers, named):
        raise ValueError(f"MODEL: Transformers has no {what} {named or ''} for {config.model_type}.")
    return named
