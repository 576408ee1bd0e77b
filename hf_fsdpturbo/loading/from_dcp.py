"""Weights from a DCP directory (``dist_config`` ``dcp_path``), read in place, each rank its own part."""

from __future__ import annotations

import os

from torch import nn

from hf_fsdpturbo.checkpoint import commit, dcp, unused
from hf_fsdpturbo.ranks import together


def load_dcp(model: nn.Module, path: str) -> None:
    """Fill a model in place from a DCP directory, or from a ``checkpoint-N`` that holds one; dtypes are converted.

    Keys may be those of the model, or those with ``model.`` before them.

    Raises:
        CheckpointError: not a DCP directory, another model; on every rank.
    """
    with together(f"dcp_path={path}"):
        directory = os.path.join(path, dcp.DCP_DIR) if os.path.isdir(os.path.join(path, dcp.DCP_DIR)) else path
        if directory != path and not commit.is_finished(path):
            raise ValueError(f"{path} has no {commit.COMPLETE}: it was not finished. Choose another checkpoint.")
        metadata = dcp.read_metadata(directory)
        wanted = dcp.model_tensors(model)
        prefix = "model." if f"model.{next(iter(wanted))}" in metadata.state_dict_metadata else ""
        saved = dcp.saved_shapes(metadata, prefix)
        if not prefix:  # such a directory may hold an optimizer beside the model
            saved = {name: entry for name, entry in saved.items() if name in wanted}
        dcp.check_fit(directory, saved, wanted, same_dtype=False)
        unused.adopt(model, path)
    dcp.read_into(directory, {f"{prefix}{name}": tensor for name, tensor in wanted.items()})
