"""Weights from a DCP directory (``dist_config`` ``dcp_path``), read in place, each rank its own part."""

from __future__ import annotations

import os

from torch import nn

from hf_fsdpturbo.checkpoint import commit, dcp, unused
from hf_fsdpturbo.checkpoint.dcp_read import SavedDirectory
from hf_fsdpturbo.checkpoint.inside import check_checkpoint_links
from hf_fsdpturbo.ranks import together


def load_dcp(model: nn.Module, path: str, verify: bool = True) -> None:
    """Fill a model in place from a DCP directory, or from a ``checkpoint-N`` that holds one; dtypes are converted.

    Args:
        model: whose keys the directory has, as they are or with ``model.`` before them.
        path: of the directory.
        verify: compare what is read with the checksums that were written, where there are any.

    Raises:
        CheckpointError: not a DCP directory, another model; on every rank.
    """
    with together(f"dcp_path={path}"):
        check_checkpoint_links(path)
        directory = os.path.join(path, dcp.DCP_DIR) if os.path.isdir(os.path.join(path, dcp.DCP_DIR)) else path
        if directory != path and not commit.is_finished(path):
            raise ValueError(f"{path} has no {commit.COMPLETE}: it was not finished. Choose another checkpoint.")
    opened = SavedDirectory(directory, verify)
    with together(f"dcp_path={path}"):
        wanted = dcp.model_tensors(model)
        prefix = "model." if f"model.{next(iter(wanted))}" in opened.tensors else ""
        saved = dcp.saved_tensors(opened, prefix)
        if not prefix:  # such a directory may hold an optimizer beside the model
            saved = {name: entry for name, entry in saved.items() if name in wanted}
        dcp.check_fit(directory, saved, wanted, same_dtype=False)
        unused.adopt(model, path)
    opened.read_into({f"{prefix}{name}": tensor for name, tensor in wanted.items()})
