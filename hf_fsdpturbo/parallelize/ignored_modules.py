"""fsdp_ignored_modules: parameters that no FSDP unit manages; autocast casts them at their uses, as in one process."""

from __future__ import annotations

from torch import nn

from hf_fsdpturbo.model_spec import name_matches


def ignored_parameters(model: nn.Module, patterns: list[str]) -> set[nn.Parameter]:
    """Parameters of all modules that a pattern names."""
    return {
        parameter
        for name, module in model.named_modules()
        if any(name_matches(pattern, name) for pattern in patterns)
        for parameter in module.parameters()
    }


def check_patterns(model: nn.Module, patterns: list[str], experts: set[nn.Parameter]) -> None:
    """Every pattern must name a parameter that FSDP would manage otherwise.

    Raises:
        ValueError: a pattern that names nothing, or nothing but experts.
    """
    for pattern in patterns:
        if not any(name_matches(pattern, name) for name, _ in model.named_modules()):
            raise ValueError(
                f"fsdp_ignored_modules: the pattern {pattern!r} matches no module of {type(model).__name__}. Use "
                "names as model.named_modules() gives them, with {*} for a number."
            )
        if not ignored_parameters(model, [pattern]) - experts:
            raise ValueError(
                f"fsdp_ignored_modules: the pattern {pattern!r} names only experts, which are left out of the outer "
                "units anyway, or modules without parameters, and has no effect. Remove it."
            )
