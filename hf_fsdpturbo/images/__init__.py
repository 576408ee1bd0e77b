"""Batches with images: what lies beside a text model, and what ranks without images do about it."""

from hf_fsdpturbo.images.columns import IMAGE_KEYS, may_have_images
from hf_fsdpturbo.images.tower_use import TowerUse, tower_use
from hf_fsdpturbo.images.towers import Beside, beside_text, why_not

__all__ = [
    "IMAGE_KEYS",
    "Beside",
    "TowerUse",
    "beside_text",
    "may_have_images",
    "tower_use",
    "why_not",
]
