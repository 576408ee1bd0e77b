"""What lies beside a text model: vision and audio towers, projectors, and parameters of the module that joins them.

Note [Towers in the root unit]. A batch without images never calls a tower. As an FSDP unit of its own, driven by its
forward, a tower would be gathered on the ranks that have images and waited for there for ever. So, in a run whose
batches may have images, everything beside the text model belongs to the root unit, which every rank gathers and
reduces in every micro-batch, whatever its batch holds. The price is a whole tower on every rank during a step (0.6 B
parameters: 1.2 GB in bf16, and as much for gradients where it trains). A run without images does not pay it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

CUT_WITH_IMAGES = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "ernie4_5_vl_moe")
"""Model types compared with one process at cp_size > 1: all that reaches their layers is cut with the tokens."""


@dataclass(frozen=True)
class Beside:
    """Everything of a model that text alone does not use.

    Attributes:
        towers: modules by name, outermost.
        holders: the modules on the way to the text model, which may have parameters of their own.
        parameters: of all of these.
    """

    towers: dict[str, nn.Module]
    holders: tuple[nn.Module, ...]
    parameters: frozenset[nn.Parameter]


def beside_text(model: Any) -> Beside:
    """Find it by what Transformers calls the model's decoder; nothing in a model that is one itself."""
    base, text = model.base_model, model.get_decoder()
    alone = text is base or text is model or getattr(model.config, "is_encoder_decoder", False)
    if alone or not any(module is text for module in base.modules()):
        return Beside({}, (), frozenset())
    shared = set(text.parameters())
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        shared |= set(end.parameters()) if isinstance(end, nn.Module) else set()
    prefix = next(name for name, module in model.named_modules() if module is base)
    holders = [module for module in base.modules() if module is not text and any(m is text for m in module.modules())]
    towers = {
        name: child
        for name, child in base.named_modules(prefix=prefix)
        if any(child in holder.children() for holder in holders) and child not in (text, *holders)
    }
    towers = {name: module for name, module in towers.items() if set(module.parameters()) - shared}
    return Beside(towers, tuple(holders), frozenset(set(base.parameters()) - shared))


def why_not(model: Any, experts: Iterable[str], cp_size: int, asked: bool) -> str | None:
    """Why a run cannot have batches with images, None where it can.

    Args:
        model: whole or on meta.
        experts: names of its expert modules.
        cp_size: ranks that share a sequence.
        asked: whether its data sets may have images.
    """
    found = beside_text(model)
    if not found.parameters:
        return f"{type(model).__name__} has nothing that reads them"
    if not asked:
        return (
            "none of the data sets that the trainer was made with has a column of images, so the towers were sharded "
            "for text alone. Give the trainer a data set with images (or a data_collator)"
        )
    for name in experts:
        tower = next((tower for tower in found.towers if f"{name}.".startswith(f"{tower}.")), None)
        if tower is not None:
            return (
                f"{type(model).__name__} has experts in {tower} ({name}), whose exchange a rank without images would "
                "not join"
            )
    if cp_size > 1 and model.config.model_type not in CUT_WITH_IMAGES:
        return (
            f"cp_size={cp_size} with images is compared for {', '.join(CUT_WITH_IMAGES)} only, not for "
            f"{model.config.model_type}. Use cp_size=1"
        )
    return None
