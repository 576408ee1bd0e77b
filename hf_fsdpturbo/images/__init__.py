"""Batches with images: what lies beside a text model, and what ranks without images do about it."""

from hf_fsdpturbo.images.bad_rows import check_pictures
from hf_fsdpturbo.images.columns import IMAGE_KEYS, may_have_images
from hf_fsdpturbo.images.cut_samples import PER_SAMPLE, images_of_first, is_of_images, note_images
from hf_fsdpturbo.images.decoding import decode, undecoded
from hf_fsdpturbo.images.tower_use import TowerUse, tower_use
from hf_fsdpturbo.images.towers import Beside, beside_text, why_not

__all__ = [
    "IMAGE_KEYS",
    "PER_SAMPLE",
    "Beside",
    "TowerUse",
    "beside_text",
    "check_pictures",
    "decode",
    "images_of_first",
    "is_of_images",
    "may_have_images",
    "note_images",
    "tower_use",
    "undecoded",
    "why_not",
]
