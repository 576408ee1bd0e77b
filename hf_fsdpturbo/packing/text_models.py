"""The module of a model that owns its decoder layers and sees positions first-hand."""

from __future__ import annotations

import inspect

from torch import nn


def text_models(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward owns decoder layers and takes ``position_ids``, innermost."""
    found = []
    for module in model.modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList):
            if "position_ids" in inspect.signature(type(module).forward).parameters:
                found.append(module)
    return found
