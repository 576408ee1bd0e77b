"""Batches with images: what lies beside a text model, and what ranks without images do about it.

    columns.py            may batches of a run have images
    bad_rows.py           pictures that cannot be had, named at set-up
    decoding.py           pictures decoded where a batch is made; numbered.py: samples that know their row
    bad_batches.py        batches that cannot be made, and whose row it is
    towers.py             what lies beside the text model, and why it belongs to the root unit
    tower_use.py          zeros where a rank had no images, no gradients where none had
    modality_experts.py   experts that image tokens alone reach, called by every rank
    cut_samples.py        an uneven evaluation batch keeps its samples' own images
"""

from __future__ import annotations

from hf_fsdpturbo.images.bad_batches import ImageTokens, NamedRows
from hf_fsdpturbo.images.bad_rows import check_pictures
from hf_fsdpturbo.images.columns import IMAGE_KEYS, may_have_images
from hf_fsdpturbo.images.cut_samples import PER_SAMPLE, images_of_first, is_of_images, note_images
from hf_fsdpturbo.images.decoding import undecoded
from hf_fsdpturbo.images.tower_use import TowerUse, tower_use
from hf_fsdpturbo.images.towers import Beside, beside_text, why_not

__all__ = [
    "IMAGE_KEYS",
    "PER_SAMPLE",
    "Beside",
    "ImageTokens",
    "NamedRows",
    "TowerUse",
    "beside_text",
    "check_pictures",
    "images_of_first",
    "is_of_images",
    "may_have_images",
    "note_images",
    "tower_use",
    "undecoded",
    "why_not",
]
