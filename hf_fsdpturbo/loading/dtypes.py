"""Storage dtypes as Transformers has them: what it keeps in float32 beside bf16 stays float32."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn


def keep_float32(model: nn.Module) -> None:
    """Give parameters that Transformers keeps in float32 (some routers) that dtype on meta: FSDP fixes it early."""
    for parameter, kept in kept_in_float32(model, cast(Any, model).dtype).items():
        parameter.data = parameter.data.to(kept)


def store_parameters(model: nn.Module, base: nn.Module, dtype: torch.dtype) -> None:
    """Convert a whole model's parameters in place, to what ``from_pretrained(dtype=...)`` gives them.

    Buffers stay as they are: rotary frequencies in bf16 are other positions.

    Args:
        model: what is converted, adapters included.
        base: the Transformers model in it, itself where there is no adapter.
        dtype: of all parameters but those that Transformers keeps in float32.
    """
    kept = kept_in_float32(base, dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(kept.get(parameter, dtype))


def kept_in_float32(model: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, torch.dtype]:
    """Parameters of a model in ``dtype`` that have another one by Transformers' plan."""
    from transformers.core_model_loading import build_glob_alternation

    plan = cast(Any, model)._get_dtype_plan(dtype)
    if not plan:
        return {}
    pattern, sources, _ = build_glob_alternation(list(plan))
    found = ((parameter, pattern.search(name)) for name, parameter in model.named_parameters())
    return {parameter: plan[sources[match.lastgroup]] for parameter, match in found if match is not None}
