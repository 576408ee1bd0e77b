"""What context parallelism cannot do exactly, refused by name while the model is still whole."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from hf_fsdpturbo.code_facts import forward_of
from hf_fsdpturbo.context_parallel.local_attention import EAGER, KERNELS
from hf_fsdpturbo.kernels.rebinding import CONV, RULE, linear_attention_layers, scope_of
from hf_fsdpturbo.packing.text_models import text_models

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # Transformers' registry, read by every attention that can be replaced
LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")
RANDOM_ROUTERS = ("phimoe",)  # draw while they train, whatever their settings: sparsemixer
STRETCHED_ROPE = ("dynamic", "longrope")  # their frequencies depend on the longest position seen: a slice sees another


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Softmax attention modules by name: those whose forward asks Transformers' registry for its function."""
    return {name: module for name, module in model.named_modules() if _calls(module, INTERFACE)}


def _calls(module: nn.Module, name: str) -> bool:
    return name in forward_of(module, f"whether it calls {name}").__code__.co_names


def _passes_keywords(module: nn.Module) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(module).forward).parameters.values())


def _refused(size: int, what: str, why: str, fix: str = "Use cp_size=1.") -> ValueError:
    return ValueError(f"cp_size={size} with {what} is not supported: {why}. {fix}")


def check_model(model: Any, size: int) -> None:
    """Refuse a model that cannot be cut exactly.

    Raises:
        ValueError: naming cp_size, the layer or field, its value and the rule; ``HiddenCode`` where a decorator hides
            what a layer does.
    """
    bases = text_models(model)
    name = type(model).__name__
    if not bases:
        raise _refused(size, f"model {name}", "it has no module with decoder layers and position_ids")
    if len(bases) > 1:
        kinds = [type(base).__name__ for base in bases]
        raise _refused(size, f"model {name}", f"it has several stacks of layers ({', '.join(kinds)})")
    base = bases[0]
    _check_config(getattr(base, "config", model.config), size)
    prefix = next(n for n, module in model.named_modules() if module is base)
    layers: Any = base.layers
    for number, layer in enumerate(layers):
        _check_layer(layer, f"{prefix}.layers.{number}".lstrip("."), size)


def _check_config(config: Any, size: int) -> None:
    kernel = KERNELS.get(requested_attention(config))
    if kernel is None:
        raise _refused(
            size,
            f"attn_implementation={requested_attention(config)!r}",
            "there is no context-parallel kernel for it",
            f"Choose one of {list(KERNELS)}.",
        )
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in LAYER_TYPES:
            raise _refused(size, f"layer_types[{index}]={kind!r}", f"only {', '.join(LAYER_TYPES)} can be cut exactly")
    dropout = getattr(config, "attention_dropout", 0.0) or 0.0
    if dropout > 0:
        raise _refused(
            size,
            f"attention_dropout={dropout}",
            "ranks would draw other masks than one process",
            "Set attention_dropout to 0, or cp_size=1.",
        )
    if (kind := getattr(config, "model_type", None)) in RANDOM_ROUTERS:
        raise _refused(size, f"model_type={kind!r}", "its router draws random numbers, others on a slice")
    for field in ("router_jitter_noise", "input_jitter_noise"):
        if (noise := getattr(config, field, 0.0) or 0.0) > 0:
            raise _refused(
                size,
                f"{field}={noise}",
                "a router that draws random numbers would draw others on a slice",
                f"Set {field} to 0, or cp_size=1.",
            )
    if getattr(config, "is_causal", True) is False:
        raise _refused(size, "is_causal=False", "only causal attention is cut exactly")
    for rope in _rope_types(getattr(config, "rope_parameters", None)):
        if rope in STRETCHED_ROPE:
            raise _refused(size, f"rope_type={rope!r}", "its frequencies depend on the longest position of the batch")


def requested_attention(config: Any) -> str:
    """The attention a config asks for; one that is installed already still names its own."""
    name = getattr(config, "_attn_implementation", None) or "eager"
    return next((key for key, kernel in KERNELS.items() if kernel.key == name), name)


def _rope_types(parameters: Any) -> list[str]:
    """rope_type of every set of rotary parameters; newer configs keep one set per layer type."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [str(parameters["rope_type"])]
    return [kind for value in parameters.values() for kind in _rope_types(value)]


def _check_layer(layer: nn.Module, name: str, size: int) -> None:
    softmax = attention_modules(layer)
    linear = dict(linear_attention_layers(layer))
    if not softmax and not linear:
        raise _refused(size, name, f"{type(layer).__name__} has neither attention nor a gated delta rule we can cut")
    if not _passes_keywords(layer):
        raise _refused(size, name, f"{type(layer).__name__} does not pass keywords on to its attention")
    for part, module in softmax.items():
        _check_attention(module, f"{name}.{part}", size)
    for part, module in linear.items():
        _check_linear(module, f"{name}.{part}", size)
    known = {id(m) for module in linear.values() for m in module.modules()}
    for part, module in layer.named_modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.LSTM, nn.GRU)) and id(module) not in known:
            raise _refused(size, f"{name}.{part}", f"a {type(module).__name__} here mixes neighbouring positions")


def _check_attention(module: nn.Module, name: str, size: int) -> None:
    config = getattr(module, "config", None)
    heads = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads % size:
        raise _refused(size, f"num_attention_heads={heads} ({name})", "cp_size must divide the query heads")
    if not _passes_keywords(module):
        raise _refused(size, name, f"{type(module).__name__} does not pass keywords on to its attention function")
    if any(hasattr(module, part) for part in ("indexer", "compressor")):
        raise _refused(size, name, f"{type(module).__name__} selects keys itself")
    window = getattr(config, "sliding_window", None)
    if window is not None and _slides(module, config) and not _names_its_window(module):
        raise _refused(
            size,
            f"sliding_window={window} ({name})",
            f"{type(module).__name__} leaves its window to a mask, which is not there for a slice",
            "Set sliding_window to None, or cp_size=1.",
        )
    if requested_attention(config) == "eager" and EAGER not in forward_of(module, "its file").__globals__:
        raise _refused(size, f"attn_implementation='eager' ({name})", "its file has no eager_attention_forward")


def _slides(module: nn.Module, config: Any) -> bool:
    """Whether the layer has a window: by its entry in ``layer_types``, or because the file makes such masks."""
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and isinstance(index, int) and index < len(kinds):
        return kinds[index] == "sliding_attention"
    return "create_sliding_window_causal_mask" in forward_of(module, "its file").__globals__


def _names_its_window(module: nn.Module) -> bool:
    """Whether the forward passes ``sliding_window=`` on to its attention function."""
    code = forward_of(module, "whether it passes sliding_window on").__code__
    return any(isinstance(names, tuple) and "sliding_window" in names for names in code.co_consts)


def _check_linear(module: nn.Module, name: str, size: int) -> None:
    heads = getattr(module, "num_v_heads", None)
    if not isinstance(heads, int) or heads % size:
        raise _refused(size, f"linear_num_value_heads={heads} ({name})", "cp_size must divide the value heads")
    if CONV not in (scope_of(module, RULE) or {}):
        raise _refused(size, name, f"its file has no {CONV}, so its convolution cannot be cut")
