"""Codes and scales of stacks that stay packed: each rank reads its own part of both, as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_fsdpturbo.loading.conversions import Conversion
from hf_fsdpturbo.loading.open_files import Slice
from hf_fsdpturbo.quantised.packed_weight import packed_weight
from hf_fsdpturbo.quantised.released_weight import ReleasedWeight


def kept_packed(
    model: nn.Module, conversion: Conversion, sources: Mapping[str, Any], device: torch.device, info: Any
) -> bool:
    """Fill the target of one conversion, if it stays packed; whether it does.

    Args:
        model: sharded or not; the target waits for its bytes.
        conversion: a renaming.
        sources: the checkpoint's tensors.
        device: where shards live.
        info: Transformers' ``LoadStateDictInfo``.

    Raises:
        ValueError: the target is made of its source by more than a name.
    """
    weight = packed_weight(model, conversion.name)
    if not isinstance(weight, ReleasedWeight):
        return False
    key = conversion.keys[0]
    source = sources[key]
    if conversion.converter is not None or not isinstance(source, Slice) or source.packed is None:
        raise ValueError(
            f"{conversion.name}: {conversion.words} of {key} cannot be done on packed numbers. Set model_init_kwargs "
            "quantization_config to {quant_method: mxfp4, dequantize: true}."
        )
    codes, scales = source.as_stored(*weight.parts())
    weight.fill_bytes(codes.to(device), scales.to(device))
    info.missing_keys.discard(conversion.name)
    return True
