"""A packed release's own files, byte for byte: what ``save_quantized`` puts beside an adapter."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from hf_fsdpturbo.checkpoint.beside import OTHERS, PROCESSOR, TOKENIZER, matching
from hf_fsdpturbo.checkpoint.commit import sync_tree
from hf_fsdpturbo.checkpoint.hub import INDEX
from hf_fsdpturbo.checkpoint.inside import check_links, own_folder
from hf_fsdpturbo.loading.config_values import CONFIG, raw_config
from hf_fsdpturbo.loading.files import config_folder, local_headers
from hf_fsdpturbo.quantised.methods import packed_as

FOLDER = "base"
"""Where it lies in the adapter's folder: readers of a model take every ``*.safetensors`` of a folder for weights."""
_STAGING, _ASIDE = "_saving-base", "_replaced-base"


def check_packed(path: str, where: Mapping[str, Any]) -> None:
    """Refuse a model that is no packed release; of a Hub id that is still to be downloaded only the config is read.

    Args:
        path: folder, Hub id, or folder of an adapter, which names its base.
        where: keywords of ``from_pretrained`` that say where its files are.

    Raises:
        ValueError: it is not there, or not packed, or damaged; names ``save_quantized`` or the file.
    """
    folder = config_folder(path, where)
    config = None if folder is None else raw_config(folder)
    if folder is None or config is None:
        raise ValueError(f"save_quantized=True copies the files of {path}, which has no {CONFIG}. Correct the path.")
    if packed_as(config, path) is None:
        raise ValueError(
            f"save_quantized=True copies a release of packed weights (mxfp4, fp8), but {path} is stored in full. "
            "Leave save_quantized out."
        )
    there = local_headers(path, where)
    if there is not None and not there[1]:
        raise ValueError(f"save_quantized=True copies the files of {path}, which has no safetensors weights there.")


def check_frozen(modules_to_save: Any) -> None:
    """Refuse an adapter that trains parts of its base.

    Raises:
        ValueError: naming ``modules_to_save``.
    """
    if modules_to_save:
        raise ValueError(
            f"save_quantized=True copies the release as it was, but modules_to_save={modules_to_save!r} of the "
            "adapter are trained parts of it. Leave one of them out."
        )


def copy_release(path: str, where: Mapping[str, Any], directory: str) -> list[str]:
    """Copy the release into ``directory/base``, which appears whole, by a rename; names of its weight files.

    Args:
        path, where: as of :func:`check_packed`.
        directory: exists; a ``base`` that is there is replaced.

    Raises:
        ValueError: as :func:`check_packed`, or a link leads out of the release's folder.
        OSError: it cannot be written.
    """
    check_packed(path, where)
    there = local_headers(path, where)
    if there is None:
        raise ValueError(f"save_quantized=True copies the files of {path}, which are not all here. Download them all.")
    source, headers = there
    out, staging, aside = (own_folder(os.path.join(directory, name)) for name in (FOLDER, _STAGING, _ASIDE))
    if os.path.realpath(out) == os.path.realpath(source):
        return list(headers)  # the run has started from an earlier copy here
    check_links(source)
    index = [INDEX] if len(headers) > 1 or os.path.isfile(os.path.join(source, INDEX)) else []
    names = [*headers, *index, CONFIG, *matching(source, TOKENIZER, PROCESSOR, OTHERS)]
    for left in (staging, aside):
        shutil.rmtree(left, ignore_errors=True)
    os.makedirs(staging)
    for name in dict.fromkeys(names):
        os.makedirs(os.path.dirname(os.path.join(staging, name)), exist_ok=True)
        shutil.copyfile(os.path.join(source, name), os.path.join(staging, name))
    sync_tree(staging)
    if os.path.isdir(out):
        os.rename(out, aside)
    os.rename(staging, out)
    shutil.rmtree(aside, ignore_errors=True)
    return list(headers)
