"""A tiny config of any family: the class's own defaults, shrunk as ``hf-fsdpturbo verify`` shrinks a user's config."""

from __future__ import annotations

from typing import Any

from hf_fsdpturbo.verify.random_weights import random_weights
from hf_fsdpturbo.verify.shrunk_config import VOCAB, shrunk, size_rules
from tests.families.overrides import OVERRIDES

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K = 32, 16, 4, 2, 8, 8, 2

RULES = size_rules(
    hidden=HIDDEN, ffn=FFN, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, mamba_head_dim=HEAD_DIM,
    experts=EXPERTS, top_k=TOP_K, groups=2, positions=512, dense_first=1, shared=1,
)  # fmt: skip

__all__ = ["EXPERTS", "RULES", "VOCAB", "tiny_config", "tiny_model"]


def tiny_config(config_class: Any, family: str) -> Any:
    """The shrunk config of a family.

    Args:
        config_class: what ``CONFIG_MAPPING`` has for the model type.
        family: whose overrides apply; a key ``sub.field`` reaches into a sub-config.
    """
    return shrunk(config_class(), lambda config: RULES, OVERRIDES.get(family, {}))


def tiny_model(family: Any) -> Any:
    """A float32 model of a :class:`~tests.families.listing.Family`, seeded, with no two parts alike."""
    import transformers

    config = tiny_config(transformers.CONFIG_MAPPING[family.model_type], family.name)
    model = random_weights(lambda: getattr(transformers, family.architecture)(config))
    model.config.architectures = [family.architecture]
    return model
