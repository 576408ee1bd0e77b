"""The one call that makes a model context-parallel, before it is sharded."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from hf_fsdpturbo.context_parallel.boundary import install_boundary
from hf_fsdpturbo.context_parallel.delta_rule import conv_reach, install_linear_attention
from hf_fsdpturbo.context_parallel.exactness import check_model, requested_attention
from hf_fsdpturbo.context_parallel.local_attention import KERNELS
from hf_fsdpturbo.context_parallel.ulysses import register_attention
from hf_fsdpturbo.kernels.rebinding import linear_attention_layers
from hf_fsdpturbo.packing.text_models import text_models


def install(model: Any, cp_mesh: DeviceMesh) -> None:
    """Make a model context-parallel over ``cp_mesh``, in place; call it before sharding and after kernels are bound.

    Args:
        model: Transformers model, on meta or any device. Its ``attn_implementation`` decides the kernel that runs on
            whole heads.
        cp_mesh: one axis, cp ranks that share a batch.

    Raises:
        ValueError: see :func:`check_model`.
    """
    size = cp_mesh.size()
    check_model(model, size)
    (base,) = text_models(model)
    config: Any = base.config
    requested = requested_attention(config)
    register_attention()
    config._attn_implementation = KERNELS[requested].key
    if any(True for _ in linear_attention_layers(model)):
        install_linear_attention(model, size)
    install_boundary(base, cp_mesh.get_group(), least_slice=max(conv_reach(model), 1))
