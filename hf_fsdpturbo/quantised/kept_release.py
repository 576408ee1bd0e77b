"""Stacks of experts that stay as an MXFP4 release packs them while adapters train beside them: which, and their bytes.

built on meta -> the files' headers -> choose -> adapters are added -> replace (bytes on meta) -> sharded as any weight
              -> read: each rank's codes and scales as they are stored (loading/kept_packed.py)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from hf_fsdpturbo.quantised.block_scales import Packed
from hf_fsdpturbo.quantised.filling import Filling
from hf_fsdpturbo.quantised.packed_weight import PackedWeight
from hf_fsdpturbo.quantised.released_weight import ReleasedWeight


class Kept(Filling):
    """The frozen stacks of one model that stay packed.

    Args:
        device: of the run.

    Attributes:
        packed: the tensors that the release packs, by key; known once its headers are.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, device)
        self.packed: dict[str, Packed] = {}

    def know(self, packed: Mapping[str, Packed]) -> None:
        """Take what the headers say, before the model is sharded."""
        self.packed = dict(packed)

    def choose(
        self, model: nn.Module, stacks: Mapping[str, tuple[str, ...]], routers: Collection[nn.Module] = ()
    ) -> None:
        """Fill ``choice``: stacks of experts that the release has in MXFP4. What else it packs comes in full."""
        self.choice = {}
        for name, module in model.named_modules():
            for stack in stacks.get(name, ()):
                path, _, leaf = stack.rpartition(".")
                found = self.packed.get(f"{name}.{stack}")
                owner = module.get_submodule(path)
                if found is not None and found.is_transposed and found.full_shape == owner.get_parameter(leaf).shape:
                    self.choice[f"{name}.{stack}"] = owner, leaf

    def _made(self, name: str, module: nn.Module, leaf: str) -> PackedWeight:
        return ReleasedWeight(module, leaf)

    def __str__(self) -> str:
        return (
            f"{len(self.weights)} frozen stacks of experts stay in MXFP4, as they are released: {self.saved()} "
            "(quantization_config Mxfp4Config(dequantize=True) has them in full)"
        )
