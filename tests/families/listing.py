"""Which model types there are: every config of Transformers with an expert-parallel plan, and those without one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

EXPERTS = "ep_dispatch_experts"
WITHOUT_PLAN = {
    "dbrx": "dbrx",
    "doge": "doge",
    "jetmoe": "jetmoe",
    "llama4": "llama4_text",  # with images it does not run in Transformers 5.24 (its output has no image_outputs)
    "longcat_flash": "longcat_flash",
    "nllb_moe": "nllb-moe",
    "switch_transformers": "switch_transformers",
}
"""Families with experts but no expert plan, and the model type they are tried with."""

HEADS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
)
"""Where the class that people train is looked up, in this order: a config that has images has the class with them."""


@dataclass(frozen=True)
class Family:
    """One model type and the class it is trained with.

    Attributes:
        name: ``config.model_type``, in the spelling of a file name.
        model_type: as Transformers spells it.
        architecture: name of the model class, or None where Transformers has none for this config alone.
        plan: whether the config, or one below it, has an expert plan.
        part_of: model types whose config holds this one, for a config without a class of its own.
    """

    name: str
    model_type: str
    architecture: str | None
    plan: bool = True
    part_of: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether its class is a language model."""
        return "Classification" not in (self.architecture or "")


def plans(config_class: Any) -> bool:
    """Whether a config class, or one of its sub-configs, sends experts out by plan."""
    own = getattr(config_class, "base_model_ep_plan", None) or {}
    below = (getattr(config_class, "sub_configs", None) or {}).values()
    return EXPERTS in own.values() or any(plans(sub) for sub in below if isinstance(sub, type))


@functools.cache
def families() -> dict[str, Family]:
    """Every family by name, in alphabetical order."""
    from transformers import CONFIG_MAPPING

    classes = {model_type: CONFIG_MAPPING[model_type] for model_type in CONFIG_MAPPING}
    planned = {model_type: config for model_type, config in classes.items() if plans(config)}
    found = [_family(model_type, config, planned) for model_type, config in planned.items()]
    for name, model_type in WITHOUT_PLAN.items():
        found.append(Family(name, model_type, _architecture(model_type), plan=False))
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


def _family(model_type: str, config: Any, planned: dict[str, Any]) -> Family:
    holders = tuple(
        other
        for other, holder in planned.items()
        if config in (getattr(holder, "sub_configs", None) or {}).values() and holder is not config
    )
    return Family(model_type.replace("-", "_"), model_type, _architecture(model_type), part_of=holders)


def _architecture(model_type: str) -> str | None:
    from transformers.models.auto import modeling_auto

    for mapping in HEADS:
        name = getattr(modeling_auto, mapping).get(model_type)
        if name is not None:
            return name if isinstance(name, str) else name[0]
    return None


ELSEWHERE = {
    "qwen3_omni_moe": "its thinker is trained (qwen3_omni_moe_thinker); Transformers gives the whole no loss",
    "qwen3_omni_moe_talker_text": "part of Qwen3-Omni's talker, which has no loss of its own in Transformers",
    "step3p5": "the text config of step3p7 under its own name; no class but step3p7's takes it",
}


def not_swept(family: Family) -> str | None:
    """Why a family is not swept by itself, None where it is."""
    if family.name in ELSEWHERE:
        return ELSEWHERE[family.name]
    if family.architecture is None:
        return f"swept as part of {', '.join(family.part_of)}: it has no class with a loss of its own"
    return None
