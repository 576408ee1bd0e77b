"""A model as a plan sees it: FSDP units with their parameters' shapes, experts, attention; from a config, on meta."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_fsdpturbo.bounded import parse_json, read_text
from hf_fsdpturbo.context_parallel.exactness import check_model as check_context_parallel
from hf_fsdpturbo.loading.dtypes import store_parameters
from hf_fsdpturbo.model_spec import find_experts
from hf_fsdpturbo.parallelize.autocast import float32_parameters
from hf_fsdpturbo.plan.planned_run import PlannedRun
from hf_fsdpturbo.plan.released import released_file
from hf_fsdpturbo.plan.storage import storage_note
from hf_fsdpturbo.quantised.methods import method_of
from hf_fsdpturbo.sharding.expert_fsdp import check_expert_shards
from hf_fsdpturbo.sharding.expert_parallel import check_experts, is_plain_swiglu, shared_by_experts
from hf_fsdpturbo.sharding.outer_fsdp import decoder_layers, head_alone
from hf_fsdpturbo.sharding.unit_dtypes import Split, split_unit

STORED = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Part:
    """One parameter: its shape, bytes an element where it is stored, and where it is gathered to compute."""

    shape: tuple[int, ...]
    stored: int
    gathered: int

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class ExpertShape:
    """One experts module: its number, stacked parameters, what all of them share, ffn width F, plain SwiGLU or not."""

    name: str
    num_experts: int
    stacked: tuple[Part, ...]
    shared: tuple[Part, ...]
    ffn: int
    is_plain: bool
    module: nn.Module = field(repr=False, compare=False)  # on meta: what a run would check is asked of it

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.stacked)


@dataclass(frozen=True)
class Unit:
    """What one FSDP unit manages: parts that are sharded, parts that stay whole; a layer's experts and linears."""

    sharded: tuple[Part, ...] = ()
    whole: tuple[Part, ...] = ()
    experts: tuple[ExpertShape, ...] = ()
    linears: dict[str, tuple[int, int]] = field(default_factory=dict)  # name in the layer -> (in, out) features
    is_linear_attention: bool = False
    has_qk_norm: bool = False

    @property
    def numel(self) -> int:
        return sum(part.numel for part in (*self.sharded, *self.whole))


@dataclass(frozen=True)
class ModelShape:
    """A model: decoder layers in order, the root, the head (alone where it can be a unit), sizes from the config."""

    name: str
    config: Any
    storage: str
    layers: tuple[Unit, ...]
    root: Unit  # with the head where it cannot stand alone
    head: Unit
    model: Any = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()
    packed: str | None = None  # what its release becomes while it loads, where it is packed
    release: str | None = None  # how it is packed: its quant_method

    @property
    def units(self) -> tuple[Unit, ...]:
        return (*self.layers, self.head, self.root)

    @property
    def expert_numel(self) -> int:
        return sum(experts.numel for unit in self.layers for experts in unit.experts)

    @property
    def dense_numel(self) -> int:
        shared = sum(part.numel for unit in self.layers for experts in unit.experts for part in experts.shared)
        return sum(unit.numel for unit in self.units) + shared

    @property
    def numel(self) -> int:
        return self.expert_numel + self.dense_numel

    @property
    def num_experts(self) -> int:
        return max((experts.num_experts for unit in self.layers for experts in unit.experts), default=0)


def check_fits(shape: ModelShape, run: PlannedRun) -> None:
    """The checks that a run makes of sizes against the model.

    Raises:
        ValueError: naming field, value, rule, layer.
    """
    sizes = run.topology
    if sizes.cp_size > 1:
        check_context_parallel(shape.model, sizes.cp_size)
    for unit in shape.layers:
        for experts in unit.experts:
            local = check_experts(experts.module, experts.name, sizes.ep_size) // sizes.ep_size
            check_expert_shards(experts.module, experts.name, local, sizes.expert_shard_size)
    if run.frozen == "mxfp4" and shape.release != "mxfp4" and shape.config.model_type != "gpt_oss":
        raise ValueError(
            f"frozen=mxfp4 is of a release in MXFP4, and MODEL {shape.name} is none. Set frozen to nf4 or full."
        )
    if sizes.ep_size > 1 and not shape.num_experts:
        raise ValueError(f"ep_size ({sizes.ep_size}): MODEL {shape.name} has no experts to spread. Set ep_size to 1.")


def read_config(model: str) -> tuple[Any, tuple[str, ...]]:
    """The text config of a shipped name, a ``config.json``, a folder, or a Hub id in the cache, and notes on it.

    Raises:
        ValueError: ``MODEL`` is none of these.
    """
    from transformers import AutoConfig

    path, notes = released_file(model) or Path(model), []
    try:
        if path.is_file():
            values = parse_json(read_text(str(path)), str(path))
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        else:
            config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"MODEL {model!r} cannot be read as a model ({type(error).__name__}: {str(error).splitlines()[0][:160]}). "
            "Give a shipped name, a folder with config.json, a config.json, or a Hub id that is in the cache."
        ) from None
    text = config.get_text_config()
    if text is not config:
        found = getattr(config, "quantization_config", None)
        if found is not None:
            text.update({"quantization_config": found})
        notes.append(f"only the text model of {config.model_type} is planned")
    return text, tuple(notes)


def shape_of(model: str, storage: str) -> ModelShape:
    """The shape of a model whose weights are stored in ``storage`` and compute in bf16; nothing is allocated.

    Raises:
        ValueError: ``MODEL`` cannot be read, or Transformers has no causal language model for it.
    """
    config, notes = read_config(model)
    return shape_of_config(config, storage, Path(model).stem if model.endswith(".json") else model, notes)


def shape_of_config(config: Any, storage: str, name: str = "model", notes: Iterable[str] = ()) -> ModelShape:
    """:func:`shape_of` for a config."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"MODEL {name!r}: Transformers builds no causal language model from its {type(config).__name__} "
            f"({type(error).__name__}: {str(error).splitlines()[0][:160]}). Correct the config."
        ) from None
    store_parameters(whole, whole, STORED[storage])
    shape = _shape(whole, storage, name, tuple(notes))
    stacked = [part.numel for unit in shape.layers for experts in unit.experts for part in experts.stacked]
    linear = [inputs * outputs for unit in shape.layers for inputs, outputs in unit.linears.values()]
    packed = storage_note(config.to_dict(), stacked, linear, STORED[storage].itemsize)
    setting = getattr(config, "quantization_config", None)
    return replace(shape, packed=packed, release=None if setting is None else method_of(setting))


def _shape(model: Any, storage: str, name: str, notes: tuple[str, ...]) -> ModelShape:
    experts = find_experts(model, 1)
    float32 = float32_parameters(model, torch.bfloat16)
    managed = {parameter for module in experts.values() for parameter in module.parameters()}
    module_names = {id(module): key for key, module in model.named_modules()}
    head = model.get_output_embeddings()
    alone = head_alone(model)
    layers = []
    for layer in decoder_layers(model):
        prefix = module_names[id(layer)]
        inside = {key: module for key, module in experts.items() if key.startswith(f"{prefix}.")}
        layers.append(_unit(layer, managed, float32, inside))
    head_unit = Unit() if alone is None else _unit(alone, managed, float32)
    root = _unit(model, managed, float32, None, None if head is None else head.weight)
    return ModelShape(name, model.config, storage, tuple(layers), root, head_unit, model, notes)


def _unit(
    module: nn.Module,
    managed: set[nn.Parameter],
    float32: set[nn.Parameter],
    experts: dict[str, nn.Module] | None = None,
    head: nn.Parameter | None = None,
) -> Unit:
    """One unit; its parameters are added to ``managed``, as ``outer_fully_shard`` does it."""
    split: Split = split_unit(module, [p for p in module.parameters() if p not in managed], float32, head)
    managed.update(module.parameters())
    sharded = [_part(p, split.in_float32) for p in module.parameters() if p in split.main]
    for group in split.large:
        sharded += [_part(p, group.in_float32) for p in group.parameters]
    names = [key for key, _ in module.named_modules()]
    inside = experts or {}
    routed = {id(inner) for block in inside.values() for inner in block.modules()}
    linears = {
        key: (inner.in_features, inner.out_features)
        for key, inner in module.named_modules()
        if isinstance(inner, nn.Linear) and id(inner) not in routed and key and experts is not None
    }
    return Unit(
        tuple(sharded),
        tuple(_part(p, True) for p in module.parameters() if p in split.small),
        tuple(_experts(key, block) for key, block in inside.items()),
        linears,
        any(key.endswith("linear_attn") for key in names),
        any(key.endswith(("q_norm", "q_layernorm", "query_layernorm")) for key in names),
    )


def _part(parameter: nn.Parameter, in_float32: bool) -> Part:
    stored = parameter.dtype.itemsize
    return Part(tuple(parameter.shape), stored, stored if in_float32 else 2)


def _experts(name: str, module: nn.Module) -> ExpertShape:
    shared = shared_by_experts(module)
    stacked = tuple(_part(p, False) for p in module.parameters() if p not in shared)
    matrices = [part for part in stacked if len(part.shape) == 3]
    largest = max(matrices, key=lambda part: part.numel, default=None)
    hidden = getattr(module, "hidden_dim", None) or getattr(module, "hidden_size", 0)
    ffn = 0
    if largest is not None:  # gate_up [E, 2F, D] or [E, D, 2F]
        others = [size for size in largest.shape[1:] if size != hidden] or [largest.shape[1]]
        ffn = others[0] // 2
    found = getattr(module, "intermediate_dim", None) or getattr(module, "intermediate_size", None) or ffn
    count = check_experts(module, name, 1)
    whole = tuple(_part(p, True) for p in shared)
    return ExpertShape(name, count, stacked, whole, int(found), is_plain_swiglu(module), module)
