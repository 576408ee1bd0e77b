"""How weights are said to be quantised in a setting, a release's config, a model object: dequantised, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SETTINGS = ("quantization_config", "load_in_8bit", "load_in_4bit")
DEQUANTISED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config", "mxfp8": "FineGrainedFP8Config"}
"""``quant_method`` of releases whose weights are dequantised while they load -> Transformers' class of settings."""


@dataclass(frozen=True)
class PackedAs:
    """How a release says that its weights are packed.

    Attributes:
        method: a key of :data:`DEQUANTISED`.
        block: rows and columns that share a scale, as its config has it; None: each matrix has one.
    """

    method: str
    block: tuple[int, int] | None = None


def packed_as(config: Mapping[str, Any], what: str) -> PackedAs | None:
    """What a release's config says of its weights; None where they are stored in full.

    Args:
        config: its fields, or those of its text model.
        what: the release, in words.

    Raises:
        ValueError: quantised in a way that is not dequantised while loading; names method, rule, fix.
    """
    inner: Any = config.get("text_config")
    found = config.get("quantization_config") or (inner.get("quantization_config") if _is_mapping(inner) else None)
    if found is None:
        return None
    method, known = method_of(found), ", ".join(sorted(DEQUANTISED))
    if method not in DEQUANTISED:
        raise ValueError(
            f"{what} is quantised with quant_method={method!r}, which is not supported: {known} are dequantised while "
            "they load. Use its unquantised version."
        )
    if field_of(found, "modules_to_convert"):
        raise ValueError(
            f"{what}: quantization_config modules_to_convert={field_of(found, 'modules_to_convert')!r} is not "
            "supported: Transformers keeps such tables packed. Use its unquantised version."
        )
    block = field_of(found, "weight_block_size", (128, 128) if method == "fp8" else None)
    if method == "mxfp4" or block is None:
        return PackedAs(method)
    sizes = list(block) if isinstance(block, list | tuple) else [block]
    if len(sizes) != 2 or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ValueError(
            f"{what}: quantization_config weight_block_size={block!r} must be two positive integers. Copy config.json "
            "again."
        )
    return PackedAs(method, (sizes[0], sizes[1]))


def check_asked(setting: Any, release: PackedAs | None, what: str) -> None:
    """Compare ``quantization_config`` of ``model_init_kwargs`` with what the release is.

    Args:
        setting: an object of Transformers', a mapping, or None.
        release: as :func:`packed_as` found it.
        what: the release, in words.

    Raises:
        ValueError: it dequantises another release than this one; names both.
    """
    asked = dequantised_by(setting)
    if asked is None or (release is not None and DEQUANTISED[release.method] == DEQUANTISED[asked]):
        return
    found = "not quantised" if release is None else f"{release.method}, for {DEQUANTISED[release.method]}"
    raise ValueError(
        f"model_init_kwargs quantization_config is {DEQUANTISED[asked]}(dequantize=True), but {what} is {found}. "
        "Leave quantization_config out: a release says itself how it is packed."
    )


def dequantised_by(setting: Any) -> str | None:
    """The method that a ``quantization_config`` asks to dequantise while loading; None where it asks for no such."""
    method = method_of(setting)
    return method if method in DEQUANTISED and field_of(setting, "dequantize") is True else None


def field_of(config: Any, name: str, default: Any = None) -> Any:
    """A field of a quantisation config, which is an object of Transformers' or a mapping."""
    return config.get(name, default) if _is_mapping(config) else getattr(config, name, default)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def method_of(config: Any) -> str:
    """Its ``quant_method`` as text; "None" where it has none."""
    method = field_of(config, "quant_method")
    return str(getattr(method, "value", method))


def refuse_settings(values: Mapping[str, Any], where: str = "") -> None:
    """Refuse settings that would quantise the model; one that dequantises a release passes.

    Args:
        values: settings by name; those that are left out, None or False ask for nothing.
        where: what they belong to, with a space after it, for the message.

    Raises:
        ValueError: naming field, value, rule and fix.
    """
    for name in SETTINGS:
        value = values.get(name)
        if not value or (name == "quantization_config" and dequantised_by(value) is not None):
            continue
        if method_of(value) in DEQUANTISED:
            raise ValueError(
                f"{where}{name}: {DEQUANTISED[method_of(value)]} without dequantize=True keeps weights packed as "
                f"Transformers has them, which cannot be trained. Leave {name} out: MXFP4 experts stay packed beside "
                "an adapter by themselves. Or set dequantize to True."
            )
        raise ValueError(
            f"{where}{name}={value!r} is not supported by hf_fsdpturbo: quantised checkpoints are refused, "
            f"as quantised weights cannot be sharded by expert. Leave {name} out."
        )


def refuse_quantised(config: Any, what: str, quantizer: Any = None) -> None:
    """Refuse a model object that is quantised.

    Args:
        config: the model's, or None.
        what: the model, in words.
        quantizer: what Transformers left on a model object that it has quantised.

    Raises:
        ValueError: naming the model and the fix.
    """
    if getattr(config, "quantization_config", None) is not None or quantizer is not None:
        raise ValueError(
            f"{what} is quantised, which is not supported: give its path (mxfp4 and fp8 are dequantised while they "
            "load), or its unquantised version."
        )
