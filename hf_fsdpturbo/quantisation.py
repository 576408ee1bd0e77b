"""Quantised weights are refused, by one rule: as a setting, in a checkpoint's config, in a model object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SETTINGS = ("quantization_config", "load_in_8bit", "load_in_4bit")


def refuse_settings(values: Mapping[str, Any], where: str = "") -> None:
    """Refuse settings that would quantise the model.

    Args:
        values: settings by name; those that are left out, None or False ask for nothing.
        where: what they belong to, with a space after it, for the message.

    Raises:
        ValueError: naming field, value, rule and fix.
    """
    for name in SETTINGS:
        if values.get(name):
            raise ValueError(
                f"{where}{name}={values[name]!r} is not supported by hf_fsdpturbo: quantised checkpoints are refused, "
                f"as quantised weights cannot be sharded by expert. Leave {name} out."
            )


def refuse_quantised(config: Any, what: str, quantizer: Any = None) -> None:
    """Refuse a model that is quantised.

    Args:
        config: the model's, or None.
        what: the model, in words.
        quantizer: what Transformers left on a model object that it has quantised.

    Raises:
        ValueError: naming the model and the fix.
    """
    if getattr(config, "quantization_config", None) is not None or quantizer is not None:
        raise ValueError(f"{what} is quantised, which is not supported: use its unquantised version.")
