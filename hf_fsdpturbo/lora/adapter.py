"""LoRA: adapters go in before sharding, step aside while the base weights are read, and are drawn as in one process.

    build on meta -> add_adapter -> shard (wrappers inside) -> hide -> Transformers reads the base weights
                  -> show -> draw_adapters: every rank draws each layer whole, keeps its slice

FSDP keeps module objects, not names: hidden wrappers stay sharded while the loader sees the names of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdpturbo.model_spec import find_experts
from hf_fsdpturbo.quantised.released_weight import plain_dtype
from hf_fsdpturbo.sharding.expert_lora import FACTORS, is_param_wrapper, store_expert_first, to_expert_first
from hf_fsdpturbo.shards import copy_full_tensor_, whole_tensor

REFERENCE = "ref"  # TRL's name
PLAIN_INITS = (True, False, "gaussian")
"""Values of init_lora_weights that need nothing of the base weights, which no rank holds whole."""


def check_peft_config(config: Any) -> None:
    """Refuse what cannot be exact on sharded weights, before anything is built; every rank raises alike.

    Raises:
        ValueError: naming field, value, rule, fix.
    """
    _refuse_other_kind(config, "peft_config.peft_type")
    refused = {
        "use_dora": (config.use_dora, "it needs norms of whole weights", "Leave it out"),
        "bias": (config.bias != "none", "base biases stay frozen", 'Set bias="none"'),
        "lora_bias": (config.lora_bias, "it is not built", "Leave it out"),
        "layer_replication": (config.layer_replication, "it changes the model's layers", "Leave it out"),
        "trainable_token_indices": (config.trainable_token_indices, "it is not built", "Leave it out"),
        "init_lora_weights": (
            config.init_lora_weights not in PLAIN_INITS,
            "it reads whole base weights, which no rank holds",
            f"Use one of {list(PLAIN_INITS)}",
        ),
    }
    for field, (found, reason, fix) in refused.items():
        if found:
            value = getattr(config, field)
            raise ValueError(f"peft_config.{field}={value!r} is not supported on sharded models: {reason}. {fix}.")
    if config.target_parameters and config.lora_dropout:
        raise ValueError(
            f"peft_config.lora_dropout is {config.lora_dropout}, but with target_parameters it must be 0: dropout "
            "cannot be applied to a weight's update. Set lora_dropout=0 (--lora_dropout 0; TRL's default is 0.05)."
        )


def refuse_other_adapters(peft_model: Any) -> None:
    """Refuse a PEFT model whose adapter is not LoRA (prompt tuning and its like run outside the sharded layers).

    Raises:
        ValueError: naming the adapter and its kind.
    """
    for name, config in peft_model.peft_config.items():
        _refuse_other_kind(config, f"model has an adapter {name!r} whose peft_type")


def _refuse_other_kind(config: Any, what: str) -> None:
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ValueError(f"{what} is {kind}, but sharded models take only LORA. Use LoraConfig, or one process.")


def check_target_parameters(config: Any, model: nn.Module) -> None:
    """Every entry of ``target_parameters`` names a parameter of the model.

    Raises:
        ValueError: naming the entry and what there is.
    """
    names = [name for name, _ in model.named_parameters()]
    for target in config.target_parameters or ():
        if not any(name == target or name.endswith(f".{target}") for name in names):
            stacked = sorted({".".join(name.split(".")[-3:]) for name, p in model.named_parameters() if p.ndim == 3})
            raise ValueError(
                f"peft_config.target_parameters: {target!r} names no parameter of {type(model).__name__}. Use the end "
                f"of a parameter's name; stacked over experts are {stacked or 'none'}."
            )


def add_adapter(model: Any, config: Any, expert_first: bool = True) -> Any:
    """``get_peft_model`` on a model that is not sharded yet (on meta or whole).

    Args:
        expert_first: store experts' factors so; not where nothing is sharded, and PEFT itself writes the files.

    Raises:
        ValueError: the configuration does not fit; see the checks above.
    """
    from peft import get_peft_model

    check_peft_config(config)
    check_target_parameters(config, model)
    on_meta = any(parameter.device.type == "meta" for parameter in model.parameters())
    peft_model = get_peft_model(model, config, low_cpu_mem_usage=on_meta)
    if expert_first:
        make_shardable(peft_model)
    return peft_model


def config_of_files(directory: str) -> Any:
    """The configuration of an adapter's files, as of an adapter that is to be trained."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(directory)
    config.inference_mode = False
    return config


def add_reference(peft_model: Any) -> None:
    """A second, frozen adapter like the one that is there, for a preference trainer's reference; before sharding.

    TRL switches to the adapter ``ref`` for the reference, and PEFT then freezes what it switches from: FSDP would
    gather parameters that are frozen in that moment as frozen ones for good. So a switch leaves that as it was.
    """
    (adapter,) = peft_model.peft_config
    on_meta = any(parameter.device.type == "meta" for parameter in peft_model.parameters())
    peft_model.add_adapter(REFERENCE, peft_model.peft_config[adapter], low_cpu_mem_usage=on_meta)
    make_shardable(peft_model)
    own = peft_model.set_adapter

    def switch(*args: Any, **kwargs: Any) -> None:
        flags = [(parameter, parameter.requires_grad) for parameter in peft_model.parameters()]
        own(*args, **kwargs)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)

    peft_model.set_adapter = switch


def fill_reference(peft_model: Any) -> None:
    """Copy the trained adapter into the reference; whole or sharded, both alike."""
    adapter = trained_adapter(peft_model)
    parameters = dict(peft_model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if f".{adapter}." in name:
                parameters[name.replace(f".{adapter}.", f".{REFERENCE}.")].copy_(parameter)


def trained_adapter(peft_model: Any) -> str:
    """Name of the one adapter that is trained."""
    (adapter,) = (name for name in peft_model.peft_config if name != REFERENCE)
    return adapter


def file_tensors(peft_model: Any, trainable: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a model's state dict under the names that PEFT's adapter file has for them."""
    from peft import get_peft_model_state_dict

    found: dict[str, Any] = get_peft_model_state_dict(peft_model, state_dict=trainable)
    return found


def make_shardable(peft_model: Any) -> None:
    """Store the factors of experts expert first, in place; for a PEFT model that is not sharded yet.

    Raises:
        ValueError: an adapter of a kind that is not built; names the layer.
    """
    base = peft_model.get_base_model()
    experts = find_experts(base, 1)
    for name, module in experts.items():
        store_expert_first(module, name)
    for name, wrapper in wrappers(base):
        if name in experts and not is_param_wrapper(wrapper):
            raise ValueError(f"modules_to_save: {name} are experts, which cannot be copied. Use target_parameters.")
        for layer in layers_inside(wrapper):
            if any(len(getattr(layer, kind, ())) for kind in ("lora_embedding_A", "lora_magnitude_vector")):
                raise ValueError(f"{name}: LoRA on embeddings and DoRA are not supported on sharded models.")


def is_wrapper(module: nn.Module) -> bool:
    """Whether PEFT put this module in place of another one (a tuner layer, or a copy that is trained whole)."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))


def wrappers(base: nn.Module) -> list[tuple[str, Any]]:
    """Outermost wrappers by name, in module order."""
    found: list[tuple[str, Any]] = []
    for name, module in base.named_modules():
        inside = found and name.startswith(f"{found[-1][0]}.")
        if not inside and is_wrapper(module):
            found.append((name, module))
    return found


def layers_inside(wrapper: Any) -> Iterator[Any]:
    """The tuner layers of one place, innermost first: the order in which PEFT made them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(wrapper, BaseTunerLayer):
        yield from layers_inside(wrapper.base_layer)
        yield wrapper


def trained_copies(base: nn.Module) -> list[nn.Module]:
    """Modules of which a copy is trained (``modules_to_save``), and those copies."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in base.modules() if isinstance(module, AuxiliaryTrainingWrapper)]


def hide(base: nn.Module) -> Callable[[], None]:
    """Put the wrapped modules themselves back in their places; returns the undo."""
    hidden: list[tuple[nn.Module, str, nn.Module]] = []
    for name, wrapper in wrappers(base):
        parent_name, _, child = name.rpartition(".")
        hidden.append((base.get_submodule(parent_name), child, wrapper))
    for parent, child, wrapper in hidden:
        parent._modules[child] = _original(wrapper)

    def show() -> None:
        for parent, child, wrapper in hidden:
            parent._modules[child] = wrapper

    return show


def _original(wrapper: Any) -> nn.Module:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return wrapper.get_base_layer() if isinstance(wrapper, BaseTunerLayer) else wrapper.original_module


def draw_adapters(peft_model: Any) -> None:
    """Initialise adapters on sharded weights as PEFT does on whole ones, from this process's CPU random state.

    Layer by layer in PEFT's order (modules, then parameters) every rank draws the whole factors and keeps its slice:
    ranks that start from one seed agree, and agree with one process. modules_to_save become copies of originals.
    """
    adapter = trained_adapter(peft_model)
    kind = peft_model.peft_config[adapter].init_lora_weights
    found = wrappers(peft_model.get_base_model())
    for on_parameters in (False, True):
        for _, wrapper in found:
            if is_param_wrapper(wrapper) is on_parameters:
                for layer in layers_inside(wrapper):
                    _draw_layer(layer, adapter, kind)
    for _, wrapper in found:
        if hasattr(wrapper, "modules_to_save"):
            original = dict(wrapper.original_module.named_parameters())
            for name, parameter in wrapper.modules_to_save[adapter].named_parameters():
                _copy(parameter, original[name])


def _copy(parameter: nn.Parameter, original: nn.Parameter) -> None:
    """Copy one into the other; of the two one may be a shard and the other whole, as their units hold them."""
    if isinstance(parameter, DTensor) is isinstance(original, DTensor):
        with torch.no_grad():
            parameter.copy_(original)
    else:
        copy_full_tensor_(parameter, whole_tensor(original.detach()))


def _draw_layer(layer: Any, adapter: str, kind: Any) -> None:
    stored = {factor: getattr(layer, factor)[adapter] for factor in FACTORS}
    a, b = (stored[factor].weight for factor in FACTORS)
    num_experts = a.shape[0] if a.ndim == 3 else 1
    rank, columns, rows = a.shape[-2] * num_experts, a.shape[-1], b.shape[-2]
    drawn = {"lora_A": nn.Linear(columns, rank, bias=False), "lora_B": nn.Linear(rank, rows, bias=False)}
    for factor, linear in drawn.items():
        getattr(layer, factor)[adapter] = linear
    layer.reset_lora_parameters(adapter, kind)
    base_dtype = plain_dtype(layer.get_base_layer(), layer.parameter_name if is_param_wrapper(layer) else "weight")
    for factor, linear in stored.items():
        getattr(layer, factor)[adapter] = linear
        whole = drawn[factor].weight.detach()
        if base_dtype.is_floating_point:  # not of quantised weights
            whole = whole.to(base_dtype)  # PEFT rounds to the base dtype on its way to float32
        if linear.weight.ndim == 3:
            whole = to_expert_first(factor, whole, num_experts)
        copy_full_tensor_(linear.weight, whole)


def as_in_files(model: Any, config: Any) -> Any:
    """``get_peft_model`` of a model on meta, with all factors as PEFT's files have them.

    Raises:
        ValueError: PEFT finds no place for the adapter in this model.
    """
    from peft import get_peft_model

    check_target_parameters(config, model)
    return get_peft_model(model, config, low_cpu_mem_usage=True)
