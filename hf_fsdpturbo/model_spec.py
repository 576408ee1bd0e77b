"""Where a model keeps its experts: name patterns as data, built in or read from Transformers' own expert plans."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_fsdpturbo.expert_adapters import llama4, longcat_flash
from hf_fsdpturbo.expert_stacks import as_pattern, configured_experts, find_flat_stacks, find_separate, find_stacks

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts: list[str] = []
    position = 0
    for token in re.finditer(r"\{([^{}]*)\}|\*|\?", pattern):
        parts.append(re.escape(pattern[position : token.start()]))
        position = token.end()
        inside = token.group(1)
        if token.group() == "*":
            parts.append(".*")
        elif token.group() == "?":
            parts.append(".")
        elif inside == "*":
            parts.append(r"\d+")
        elif (bounds := re.fullmatch(r"(\d+)-(\d+)", inside)) and int(bounds[1]) <= int(bounds[2]):
            parts.append("(?:" + "|".join(str(n) for n in range(int(bounds[1]), int(bounds[2]) + 1)) + ")")
        else:
            raise ValueError(f"Pattern {pattern!r}: {token.group()!r} is neither {{*}} nor {{a-b}} with a <= b.")
    parts.append(re.escape(pattern[position:]))
    return re.compile("".join(parts), re.DOTALL)


def name_matches(pattern: str, name: str) -> bool:
    """Whether the whole dotted module name fits a pattern.

    ``{*}`` is one run of digits, ``{a-b}`` a number from a to b, ``*`` any characters, ``?`` one character.

    Raises:
        ValueError: braces that hold anything else.
    """
    return _compiled(pattern).fullmatch(name) is not None


@dataclass(frozen=True)
class FSDPTurboEPModelSpec:
    """Where a model's experts are.

    Attributes:
        model_type: ``config.model_type`` it is for.
        ep_modules: patterns of the experts modules (stacked weights, one expert a row of dim 0).
        ep_fsdp_modules: patterns of the modules EFSDP wraps. They must name the experts themselves (checked against
            the model): wrapping the MoE block round them would leave router and shared-expert gradients unreduced.
        prepare_fn: called with the model before it is sharded, perhaps more than once, or None. Where the family's own
            code does not call its experts by the field's convention, it brings them to it: ``expert_adapters``.
    """

    model_type: str
    ep_modules: tuple[str, ...]
    ep_fsdp_modules: tuple[str, ...] = ()
    prepare_fn: Callable[[nn.Module], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for pattern in (*self.ep_modules, *self.ep_fsdp_modules):
            name_matches(pattern, "")
        if not self.ep_fsdp_modules:
            object.__setattr__(self, "ep_fsdp_modules", self.ep_modules)

    @staticmethod
    def register(
        model_type: str,
        *,
        ep_modules: list[str] | tuple[str, ...],
        ep_fsdp_modules: list[str] | tuple[str, ...] | None = None,
        prepare_fn: Callable[[nn.Module], None] | None = None,
    ) -> FSDPTurboEPModelSpec:
        """Add a family. Patterns are whole module names (see :func:`name_matches`).

        Raises:
            ValueError: the model type is registered already, a pattern is malformed, or ``prepare_fn`` does not take
                a model.
        """
        if prepare_fn is not None:
            _check_takes_model(model_type, prepare_fn)
        if model_type in _REGISTRY:
            raise ValueError(f"model_type={model_type!r} already has an FSDPTurbo EP spec: {_REGISTRY[model_type]}.")
        spec = FSDPTurboEPModelSpec(model_type, tuple(ep_modules), tuple(ep_fsdp_modules or ()), prepare_fn)
        _REGISTRY[model_type] = spec
        return spec

    @staticmethod
    def get(model: PreTrainedModel) -> FSDPTurboEPModelSpec:
        """The spec of a model: registered by hand, else read from the expert plan of its Transformers config.

        Raises:
            ValueError: neither exists.
        """
        model_type = getattr(model.config, "model_type", None)
        spec = _REGISTRY.get(model_type) if model_type else None
        spec = spec or _from_transformers_plan(model)
        if spec is None:
            raise ValueError(
                f"No FSDPTurbo EP spec is registered for model_type={model_type!r}, and its Transformers config has "
                f"no expert-parallel plan. {_what_to_do(model, str(model_type))}"
            )
        return spec

    def prepare(self, model: nn.Module) -> None:
        """Run the family's preparation, if it has one.

        Raises:
            ValueError: it expects another model; naming the model type and what it stumbled over.
        """
        if self.prepare_fn is None:
            return
        try:
            self.prepare_fn(model)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"The prepare_fn of model_type={self.model_type!r} failed on {type(model).__name__} with "
                f"{type(error).__name__}: {error}. It is called with the model before it is sharded and must take it "
                "as it is: mend the function that was registered."
            ) from error

    def has_experts(self, model: nn.Module) -> bool:
        """Whether any module is named by ``ep_modules``."""
        return bool(_matching(model, self.ep_modules))

    def find_experts(self, model: nn.Module) -> dict[str, nn.Module]:
        """Experts modules by name, in model order.

        Raises:
            ValueError: no module matches, or ``ep_fsdp_modules`` names others.
        """
        found = _matching(model, self.ep_modules)
        if not found:
            raise ValueError(
                f"The EP spec of model_type={self.model_type!r} looks for {list(self.ep_modules)}, but no module of "
                f"{type(model).__name__} has such a name. Register patterns that match model.named_modules()."
            )
        wrapped = _matching(model, self.ep_fsdp_modules)
        if differing := sorted(wrapped.keys() ^ found.keys()):
            raise ValueError(
                f"The EP spec of model_type={self.model_type!r}: ep_fsdp_modules {list(self.ep_fsdp_modules)} must "
                f"name the experts themselves, as ep_modules {list(self.ep_modules)} does, but they differ in "
                f"{differing[:4]}. Leave ep_fsdp_modules out."
            )
        return found


def _check_takes_model(model_type: str, prepare_fn: Callable[[nn.Module], None]) -> None:
    try:
        inspect.signature(prepare_fn).bind(None)
    except TypeError as error:
        raise ValueError(
            f"prepare_fn={prepare_fn!r} of model_type={model_type!r} cannot be called with one argument, the model: "
            f"{error}. Pass a function prepare_fn(model)."
        ) from None


def _what_to_do(model: PreTrainedModel, model_type: str) -> str:
    """End of the refusal, by what the model holds: stacked experts can be registered, others cannot."""
    count = configured_experts(model.config)
    stacks, separate = find_stacks(model, count), find_separate(model, count)
    if not stacks and separate is not None:
        name, module = separate
        kind = type(next(module.children())).__name__
        return (
            f"Its experts are separate modules ({as_pattern(name)}: {count} {kind}), and expert parallelism shards "
            "parameters that are stacked over experts. Train it with ep_size=1."
        )
    if found := stacks or find_flat_stacks(model, count):
        return (
            f"Train it with ep_size=1, or register it: FSDPTurboEPModelSpec.register({model_type!r}, ep_modules=..., "
            f"prepare_fn=...). Parameters that seem to be stacked over experts are in "
            f"{list(dict.fromkeys(map(as_pattern, found)))}; docs/register.md has examples."
        )
    return "No experts were found in it, stacked or separate. Train it with ep_size=1."


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Module]:
    return {n: module for n, module in model.named_modules() if any(name_matches(pattern, n) for pattern in patterns)}


def _alias_hidden_size(model: nn.Module) -> None:
    """fsdp_turbo's dispatchers read ``hidden_size`` where Transformers says ``hidden_dim``; needed while they do."""
    for module in model.modules():
        if hasattr(module, "num_experts") and hasattr(module, "hidden_dim") and hasattr(module, "gate_up_proj"):
            module.hidden_size = module.hidden_dim


_QWEN3_5_MOE = (
    "model.language_model.layers.{*}.mlp.experts",  # the vision-language model
    "model.layers.{*}.mlp.experts",  # its text model alone
)

_REGISTRY: dict[str, FSDPTurboEPModelSpec] = {
    "qwen3_moe": FSDPTurboEPModelSpec(
        "qwen3_moe", ("model.layers.{*}.mlp.experts",), prepare_fn=_alias_hidden_size
    ),
    "qwen3_5_moe": FSDPTurboEPModelSpec("qwen3_5_moe", _QWEN3_5_MOE),
    "qwen3_5_moe_text": FSDPTurboEPModelSpec("qwen3_5_moe_text", _QWEN3_5_MOE),
    "llama4": FSDPTurboEPModelSpec("llama4", llama4.PATTERNS, prepare_fn=llama4.prepare),
    "llama4_text": FSDPTurboEPModelSpec("llama4_text", llama4.PATTERNS, prepare_fn=llama4.prepare),
    "longcat_flash": FSDPTurboEPModelSpec(
        "longcat_flash", longcat_flash.PATTERNS, prepare_fn=longcat_flash.prepare
    ),
}


def _from_transformers_plan(model: PreTrainedModel) -> FSDPTurboEPModelSpec | None:
    """Patterns of ``ep_dispatch_experts`` in every sub-model's ``base_model_ep_plan`` (``*``: one part)."""
    from transformers import PreTrainedModel

    patterns: list[str] = []
    for prefix, module in model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        plan = getattr(module.config, "base_model_ep_plan", None) or {}
        base = module.base_model_prefix if hasattr(module, module.base_model_prefix) else ""
        for key, style in plan.items():
            if style == "ep_dispatch_experts":
                name = ".".join(part for part in (prefix, base, key) if part)
                patterns.append(re.sub(r"(?<=\.)\*(?=\.)", "{*}", name))
    names = [name for name, _ in model.named_modules()]
    used = tuple(dict.fromkeys(p for p in patterns if any(name_matches(p, name) for name in names)))
    return FSDPTurboEPModelSpec(model.config.model_type, used) if used else None


def find_experts(model: PreTrainedModel, ep_size: int) -> dict[str, nn.Module]:
    """Experts modules by name; none for a dense model, or a family without a spec, at ep_size 1.

    Raises:
        ValueError: ep_size > 1 and the model has no spec or no experts.
    """
    try:
        spec = FSDPTurboEPModelSpec.get(model)
    except ValueError:
        if ep_size > 1:
            raise
        return {}
    spec.prepare(model)
    if ep_size == 1 and not spec.has_experts(model):
        return {}  # a dense model of a family that has others, e.g. mlp_only_layers naming every layer
    return spec.find_experts(model)
