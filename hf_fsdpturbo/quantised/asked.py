"""Which quantisation was asked for: from ``quantization_config`` and TRL's fields, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_fsdpturbo import compat
from hf_fsdpturbo.quantised.methods import SETTINGS, field_of, method_of, refuse_settings

TYPES = ("nf4", "fp4")


@dataclass(frozen=True)
class FourBit:
    """Frozen weights in 4 bits by bitsandbytes.

    Attributes:
        quant_type: "nf4" or "fp4".
        nested: the scales of the blocks are quantised too.
        skip: names of modules that stay as they are; None: what Transformers leaves out by itself (the LM head).
    """

    quant_type: str = "nf4"
    nested: bool = False
    skip: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.quant_type}{', nested' if self.nested else ''}"


def _field(config: Any, name: str, default: Any = None) -> Any:
    value = field_of(config, name)
    return default if value is None else value


def _is_four_bit(config: Any) -> bool:
    is_bitsandbytes = _field(config, "quant_method") is None or method_of(config) == "bitsandbytes"
    return bool(_field(config, "load_in_4bit")) and is_bitsandbytes


def asked_for(values: Mapping[str, Any], where: str = "") -> FourBit | None:
    """The 4-bit quantisation that settings ask for; None where they ask for none.

    Args:
        values: settings by name: ``quantization_config`` (an object or a mapping), ``load_in_4bit``, ...
        where: what they belong to, with a space after it, for messages.

    Raises:
        ValueError: another quantisation, or a value that 4 bits cannot have; names field, value, rule, fix.
        MissingDependencyError: bitsandbytes is not installed.
    """
    config = values.get("quantization_config")
    if values.get("load_in_4bit") and config is None:
        config = {**values, "quant_method": "bitsandbytes"}
    if config is None or not _is_four_bit(config):
        refuse_settings(values, where)
        return None
    others = {name: values.get(name) for name in SETTINGS if name not in ("quantization_config", "load_in_4bit")}
    refuse_settings(others, where)
    if _field(config, "load_in_8bit"):
        raise ValueError(f"{where}load_in_4bit and load_in_8bit are both set. Leave load_in_8bit out.")
    quant_type = _field(config, "bnb_4bit_quant_type", "fp4")  # BitsAndBytesConfig's default
    if quant_type not in TYPES:
        raise ValueError(f"{where}bnb_4bit_quant_type is {quant_type!r}, but must be one of {list(TYPES)}.")
    compat.require("bitsandbytes", f"{where}load_in_4bit=True")
    skip = _field(config, "llm_int8_skip_modules")
    return FourBit(
        quant_type, bool(_field(config, "bnb_4bit_use_double_quant", False)), None if skip is None else tuple(skip)
    )


def take(values: dict[str, Any], given: Any = None) -> FourBit | None:
    """As :func:`asked_for` of ``from_pretrained`` keywords, which lose those settings where 4 bits are asked for.

    Args:
        values: the keywords.
        given: the trainer's own ``quantization_config``.

    Raises:
        ValueError: also where both name one.
    """
    settings = {name: values[name] for name in (*SETTINGS, *_BNB) if name in values}
    if given is not None and settings.get("quantization_config") is not None:
        raise ValueError(
            "quantization_config is a trainer argument and in model_init_kwargs. Set it in one place, the first."
        )
    if given is not None:
        settings["quantization_config"] = given
    found = asked_for(settings, "model_init_kwargs: ")
    if found is not None:
        for name in settings.keys() & values.keys():
            del values[name]
    return found


_BNB = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
