"""The private parameter groups, ``dist_config``, ``kernel_config``, ``init_config``: strict dataclasses and parsing.

What the user wrote arrives here as a mapping (``mappings.py``) and leaves as one of three dataclasses whose every
field has been checked. An unknown key, a misplaced key or a wrong type is an error.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hf_fsdpturbo.bounded import check_path, cut
from hf_fsdpturbo.topology import positive

DISPATCHER_NAMES = ("eager", "fused", "mc2", "domino", "auto")
KERNEL_NAMES = ("auto", "flash-linear-attention", "liger")
FLA_OPERATOR_NAMES = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
CHUNK_SIZES = (16, 32, 64)
FEW = 8
"""Unknown keys that a message names."""

# Public fields of FSDPTurboArguments that people put into dist_config by mistake.
TOPOLOGY_FIELDS = (
    "dp_size",
    "cp_size",
    "cp_mode",
    "mp_replicate_size",
    "mp_shard_size",
    "ranks_per_node",
    "dist_timeout",
)
PUBLIC_ONLY_FIELDS = (*TOPOLOGY_FIELDS, "kernel_config", "init_config", "dist_config")
SPEC_FIELDS = ("ep_modules", "ep_fsdp_modules")


def misplaced_hint(key: str, where: str) -> str:
    """One sentence on where ``key`` belongs, or an empty string."""
    if key in SPEC_FIELDS:
        return (
            f" {key} belongs to a model spec, not to the configuration: FSDPTurboEPModelSpec.register(model_type, "
            f"{key}=[...])."
        )
    if where == "dist_config" and key in PUBLIC_ONLY_FIELDS:
        return f" {key} is a training argument of its own: pass --{key} (or {key}=...) outside {where}."
    private = [f.name for f in dataclasses.fields(FSDPTurboParams)]
    if where != "dist_config" and key in private:
        return f" {key} belongs inside dist_config: dist_config={{'{key}': ...}}."
    return ""


def unknown_params(where: str, unknown: list[str], valid: list[str], label: Callable[[str], str] = str) -> ValueError:
    """The error for keys nobody knows: starts with ``Unknown params``, lists the valid ones, says where keys belong.

    Args:
        label: how a key is spelled at that place (prefix, capitals).
    """
    hints = "".join(misplaced_hint(key, where) for key in unknown)
    spelled = [sorted(cut(label(key))[1:-1] for key in keys) for keys in (unknown[:FEW], valid)]
    return ValueError(f"Unknown params in {where}: {spelled[0]}. Valid ones: {spelled[1]}.{hints}")


def _matches(value: Any, kind: Any) -> bool:
    """Whether ``value`` has exactly the annotated type; a bool is never an int."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(_matches(value, option) for option in get_args(kind))
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in get_args(kind))
    if origin is list:
        return isinstance(value, list) and all(_matches(item, get_args(kind)[0]) for item in value)
    return type(value) is kind


def _kind_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(option) for option in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_kind_name(option) for option in get_args(kind))
    if kind is type(None):
        return "None"
    return kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError unless ``value`` is of the annotated type ``kind``, with no conversion of any sort."""
    if not _matches(value, kind):
        raise ValueError(
            f"{name} must be {_kind_name(kind)}, but it is {cut(value)} ({type(value).__name__}). Correct it."
        )


@dataclass
class FSDPTurboParams:
    """``dist_config``: how experts and layers are sharded. Nothing but these fields is accepted.

    Attributes:
        name: only this one.
        reshard_after_forward: free gathered weights after a layer's forward, gather them again in backward.
        offload_params: keep sharded weights, gradients and optimizer state in host memory.
        pin_memory: page-locked host memory for ``offload_params``.
        dcp_path: a checkpoint in DCP's format whose weights replace those of the model.
        ep_size: ranks that share the experts; divides data-parallel ranks and every layer's experts.
        ep_dispatcher: how tokens reach their experts; left out: ``auto`` on accelerators where ep_size is above 1.
        fsdp_ignored_modules: patterns of modules that FSDP leaves whole on every rank.
        hook_modules: ``ep_backend`` fsdp_turbo with ``fsdp_implementation`` custom: patterns of modules that it hooks.
        fsdp_implementation: ``ep_backend`` fsdp_turbo: torch's FSDP2, or the library's own.
        efsdp_size: ranks that shard each expert's weights; data-parallel ranks / ep_size when left out.
        ep_backend: our expert mesh, or the upstream library's.
        param_storage_dtype: dtype in which weights are stored between steps; ``auto`` as they are loaded.

    Raises:
        ValueError: a field has the wrong type or a value outside its set; the message names field, value and rule.
    """

    name: Literal["fsdpturbo"] = "fsdpturbo"
    reshard_after_forward: bool = True
    offload_params: bool = False
    pin_memory: bool = True
    dcp_path: str | None = None
    ep_size: int = 1
    ep_dispatcher: Literal["eager", "fused", "mc2", "domino", "auto"] = "eager"
    fsdp_ignored_modules: list[str] = field(default_factory=list)
    hook_modules: list[str] = field(default_factory=list)
    fsdp_implementation: Literal["native", "custom"] = "native"
    efsdp_size: int | None = None
    ep_backend: Literal["torch", "fsdp_turbo"] = "torch"
    param_storage_dtype: Literal["auto", "bfloat16", "float32"] = "auto"

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            check_type(f"dist_config {name}", getattr(self, name), kind)
        positive("dist_config ep_size", self.ep_size)
        if self.efsdp_size is not None:
            positive("dist_config efsdp_size", self.efsdp_size)
        if self.dcp_path is not None:
            check_path("dist_config dcp_path", self.dcp_path)
        for name in ("fsdp_ignored_modules", "hook_modules"):
            for pattern in getattr(self, name):
                _check_pattern(f"dist_config {name}", pattern)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, every field present."""
        return dataclasses.asdict(self)


@dataclass
class KernelParams:
    """``kernel_config``, parsed.

    Attributes:
        name: kernel sets in the order in which they are applied, each of :data:`KERNEL_NAMES`.
        include_kernels: FLA operators to use, each of :data:`FLA_OPERATOR_NAMES`; None means all of them.
        chunk_size: tokens a chunk of the gated delta rule; 16, 32 or 64.
    """

    name: list[str]
    include_kernels: list[str] | None = None
    chunk_size: int = 64

    def __post_init__(self) -> None:
        check_type("kernel_config chunk_size", self.chunk_size, int)
        if self.chunk_size not in CHUNK_SIZES:
            raise ValueError(
                f"kernel_config chunk_size must be one of {CHUNK_SIZES}, but it is {self.chunk_size}. "
                "Use one of these."
            )
        _check_names("kernel_config name", self.name, KERNEL_NAMES)
        if self.include_kernels is not None:
            _check_names("kernel_config include_kernels", self.include_kernels, FLA_OPERATOR_NAMES)

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> KernelParams:
        """From the user's mapping: comma lists become lists, "auto" / True for include_kernels becomes None."""
        unknown = [key for key in config if key not in ("name", "include_kernels", "chunk_size")]
        if unknown:
            raise unknown_params("kernel_config", unknown, ["name", "include_kernels", "chunk_size"])
        if "name" not in config:
            raise ValueError(
                f"kernel_config needs a name (a comma list of {KERNEL_NAMES}), but it is {cut(dict(config))}. Add "
                "name."
            )
        names = _comma_list("kernel_config name", config["name"])
        fla_only = [key for key in ("include_kernels", "chunk_size") if key in config]
        if fla_only and "flash-linear-attention" not in names:
            raise ValueError(
                f"kernel_config {fla_only[0]}={cut(config[fla_only[0]])} only acts on 'flash-linear-attention', which "
                f"is not in name={cut(config['name'])}. Add it to name, or leave {fla_only[0]} out."
            )
        include = config.get("include_kernels", True)
        selected = (
            None if include is True or include == "auto" else _comma_list("kernel_config include_kernels", include)
        )
        return cls(name=names, include_kernels=selected, chunk_size=config.get("chunk_size", 64))


@dataclass
class InitParams:
    """``init_config``: who reads the weights.

    Attributes:
        name: init_on_meta: each rank its own slices; init_on_rank0: rank 0, which scatters; init_on_default: every
            rank, all.
    """

    name: Literal["init_on_meta", "init_on_rank0", "init_on_default"] = "init_on_meta"

    def __post_init__(self) -> None:
        check_type("init_config name", self.name, get_type_hints(type(self))["name"])

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> InitParams:
        """From the user's mapping."""
        unknown = [key for key in config if key != "name"]
        if unknown:
            raise unknown_params("init_config", unknown, ["name"])
        return cls(**config)


def _check_pattern(name: str, pattern: str) -> None:
    """Refuse what no module name can match.

    Raises:
        ValueError: an empty pattern, or a character that is neither of a name nor of the pattern language.
    """
    if not re.fullmatch(r"[\w.*?{}-]+", pattern):
        raise ValueError(
            f"{name} has the pattern {cut(pattern)}, which no module name can match. Name modules such as "
            "'model.layers.{*}.mlp.gate': {*} is a number, {0-3} a range, * any characters, ? one."
        )


def _comma_list(name: str, value: Any) -> list[str]:
    if not isinstance(value, str):
        raise ValueError(
            f"{name} must be a string, a comma list of names, but it is {cut(value)} ({type(value).__name__}). Write "
            "'first, second'."
        )
    return [part.strip() for part in value.split(",")]


def _check_names(name: str, values: list[str], valid: tuple[str, ...]) -> None:
    check_type(name, values, list[str])
    if not values or values == [""]:
        raise ValueError(f"{name} selects nothing. Name at least one of {valid}, or leave it out.")
    for value in values:
        if value not in valid:
            raise ValueError(f"{name} {cut(value)} is unknown; valid ones are {valid}. Use one of these.")
    if len(set(values)) != len(values):
        raise ValueError(f"{name} names something twice: {cut(values)}. Name each once.")


def check_dist_keys(config: Mapping[str, Any]) -> None:
    """Raise ``Unknown params ...`` for keys of a ``dist_config`` mapping that :class:`FSDPTurboParams` lacks."""
    valid = [f.name for f in dataclasses.fields(FSDPTurboParams)]
    unknown = [key for key in config if key not in valid]
    if unknown:
        raise unknown_params("dist_config", unknown, valid)
