"""What an adapter's files do to which parameter of its base: PEFT on meta gives names, strengths and order.

Shapes: E experts, r rank, I in, O out features; V tokens, D hidden. PEFT's factors in files:

    linear       A [r, I]       B [O, r]                     weight [O, I]; fan_in_fan_out (GPT-2): [I, O]
    embedding    A [r, V]       B [D, r]                     weight [V, D]
    stacked      A [E*r, I]     B [O, r*E], expert fastest   weight [E, O, I]; transposed (gpt-oss): [E, I, O]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_fsdpturbo.compat import require
from hf_fsdpturbo.lora.adapter import as_in_files, config_of_files, layers_inside, wrappers
from hf_fsdpturbo.merge.adapter_config import Adapter
from hf_fsdpturbo.sharding.expert_lora import base_module, is_param_wrapper

PREFIX = "base_model.model."


@dataclass(frozen=True)
class Factors:
    """One ``s B A``: keys of both in the adapter's file, ``s``, and how the weight lies."""

    a: str
    b: str
    scaling: float
    kind: str  # linear, embedding, stacked
    is_transposed: bool = False


@dataclass
class Update:
    """What becomes of one parameter: a tensor of the file in its place, then factors in PEFT's order."""

    whole: str | None = None
    factors: list[Factors] = field(default_factory=list)


def plan_of(model: Any, adapter: Adapter, shapes: dict[str, tuple[int, ...]]) -> dict[str, Update]:
    """Updates by parameter of the model, every tensor of the adapter's file used once.

    Args:
        model: on meta; PEFT's wrappers are put into it.
        shapes: of the adapter's file, by key.

    Raises:
        ValueError: a tensor of the file has no place, another shape, or is missing; names file and key.
    """
    require("peft", "merge")
    try:
        peft_model = as_in_files(model, config_of_files(adapter.folder))
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"ADAPTER {adapter.folder} does not fit {type(model).__name__}: {' '.join(str(error).split())[:300]} Give "
            "the base that it was trained on (--base)."
        ) from error
    (name_of_adapter,) = peft_model.peft_config
    names = {id(module): name for name, module in peft_model.named_modules()}
    plan: dict[str, Update] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for name, wrapper in wrappers(peft_model.get_base_model()):
        for layer in layers_inside(wrapper):
            target = f"{name}.{layer.parameter_name if is_param_wrapper(layer) else 'weight'}"
            factors, found = _factors(layer, names[id(layer)], name_of_adapter, target)
            plan.setdefault(target, Update()).factors.append(factors)
            expected |= found
        if hasattr(wrapper, "modules_to_save"):
            for inner, parameter in wrapper.modules_to_save[name_of_adapter].named_parameters():
                key = f"{PREFIX}{name}.{inner}"
                plan.setdefault(f"{name}.{inner}", Update()).whole = key
                expected[key] = tuple(parameter.shape)
    for target, key in saved_embeddings(peft_model.get_base_model(), shapes).items():
        if key not in expected:
            plan.setdefault(target, Update()).whole = key
            expected[key] = shapes[key]
    _compare(adapter, shapes, expected)
    return plan


def _factors(layer: Any, path: str, adapter: str, target: str) -> tuple[Factors, dict[str, tuple[int, ...]]]:
    """The factors of one layer, and the shapes that their tensors must have.

    Raises:
        ValueError: a layer whose update is no matrix (a convolution); names it.
    """
    scaling = float(layer.scaling[adapter])
    if adapter in layer.lora_embedding_A:
        a, b = f"{path}.lora_embedding_A", f"{path}.lora_embedding_B"
        tensors = (layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter])
        factors = Factors(a, b, scaling, "embedding")
    else:
        a, b = f"{path}.lora_A.weight", f"{path}.lora_B.weight"
        tensors = (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
        if is_param_wrapper(layer):
            ndim, is_transposed = layer.get_param().ndim, bool(getattr(base_module(layer), "is_transposed", False))
            factors = Factors(a, b, scaling, "stacked" if ndim == 3 else "linear", ndim == 3 and is_transposed)
        else:
            ndim = layer.get_base_layer().weight.ndim
            factors = Factors(a, b, scaling, "linear", bool(layer.fan_in_fan_out))
        if ndim not in (2, 3) or tensors[0].ndim != 2:
            raise ValueError(f"ADAPTER: {target} is a convolution, whose LoRA merge does not take. Use PEFT's.")
    return factors, {key: tuple(tensor.shape) for key, tensor in zip((a, b), tensors, strict=True)}


def saved_embeddings(model: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Parameter -> key of the embeddings that a file holds whole, as PEFT writes them after a vocabulary was resized.

    Args:
        model: with PEFT's wrappers or without.
        shapes: of the adapter's file, by key.
    """
    modules = {id(module): name for name, module in model.named_modules()}
    found = {}
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        name = modules.get(id(layer))
        for middle in ("", "base_layer."):
            key = f"{PREFIX}{name}.{middle}weight"
            if name is not None and key in shapes:
                found[f"{name}.weight"] = key
    return found


def _compare(adapter: Adapter, shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    for what, keys in (("lacks", expected.keys() - shapes.keys()), ("holds", shapes.keys() - expected.keys())):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            unknown = "" if what == "lacks" else ", which have no place in the base"
            raise ValueError(
                f"ADAPTER: {adapter.weights} {what} {min(keys)}{more}{unknown}. Copy the adapter again, or give the "
                "base that it was trained on (--base)."
            )
    for key, shape in expected.items():
        if shapes[key] != shape:
            raise ValueError(
                f"ADAPTER: {adapter.weights}: {key} has shape {shapes[key]}, but the base and adapter_config.json ask "
                f"for {shape}. Give the base that it was trained on (--base)."
            )
