"""What an experts module holds, read from its attributes; and what a model without a spec seems to hold, for refusals.

E experts. The attributes are those that ``expert_adapters.adapt_experts`` sets; without them all parameters of the
module itself are stacks ``[E, ...]``, and parameters of modules inside it are shared by all experts.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from hf_fsdpturbo.quantised.packed_weight import is_statistic

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of a config that give the number of experts."""


def stack_names(experts: nn.Module) -> tuple[str, ...]:
    """Names, below the module, of the parameters that are stacked over experts."""
    declared = getattr(experts, "expert_stacks", None)
    if declared is not None:
        return declared
    return tuple(name for name, _ in experts.named_parameters(recurse=False) if not is_statistic(name))


def shared_parameters(experts: nn.Module) -> set[nn.Parameter]:
    """All other parameters below the module, but for what belongs to a quantised stack."""
    stacks = set(stack_names(experts))
    return {p for name, p in experts.named_parameters() if name not in stacks and not is_statistic(name)}


def called_by(experts: nn.Module) -> str:
    """Name of the attribute that is called with rows and routing."""
    return "experts_forward" if hasattr(experts, "experts_forward") else "forward"


def fits(experts: nn.Module, rows: int, num_experts: int) -> bool:
    """Whether a stack of so many rows holds so many experts."""
    own = num_experts * int(getattr(experts, "rows_per_expert", 1))
    return rows == own or (bool(getattr(experts, "has_unused_experts", False)) and rows > own)


def transposed(experts: nn.Module) -> bool:
    """Whether stacked matrices are ``[E, in, out]``, by the family's own flag or the adapter's."""
    return bool(getattr(experts, "is_transposed", False) or getattr(experts, "stacks_are_transposed", False))


def configured_experts(config: Any) -> int | None:
    """Number of experts that a config, or one below it, names."""
    for field in COUNTS:
        if isinstance(count := getattr(config, field, None), int) and count > 1:
            return count
    below = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {})
    return next((count for sub in below if sub is not None and (count := configured_experts(sub))), None)


def find_stacks(model: nn.Module, num_experts: int | None) -> list[str]:
    """Names of modules that hold parameters ``[E, rows, columns]``, in model order; any E where it is not known."""
    return [
        name
        for name, module in model.named_modules()
        if not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
        and any(p.ndim == 3 and num_experts in (None, p.shape[0]) for p in module.parameters(recurse=False))
    ]


def find_flat_stacks(model: nn.Module, num_experts: int | None) -> list[str]:
    """The same of stacks of two dims: a row an expert (not in a linear layer: that is a router), or several rows."""
    if num_experts is None:
        return []
    found = []
    for name, module in model.named_modules():
        rows = {p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 2}
        per_expert = num_experts in rows or ("expert" in name and any(size % num_experts == 0 for size in rows))
        if per_expert and not isinstance(module, nn.Linear):
            found.append(name)
    return found


def find_separate(model: nn.Module, num_experts: int | None) -> tuple[str, nn.Module] | None:
    """A list or dict, inside a layer, of as many modules of one class as there are experts, with its name; or None."""
    for name, module in model.named_modules():
        inside_layer = re.search(r"\.\d+\.", name) is not None
        if inside_layer and isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            kinds = [type(child) for child in module.children() if any(True for _ in child.parameters())]
            if kinds and kinds.count(kinds[0]) == num_experts:
                return name, module
    return None


def as_pattern(name: str) -> str:
    """A module name with every number as ``{*}``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "{*}", name)
