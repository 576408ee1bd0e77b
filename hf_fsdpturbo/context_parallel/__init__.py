"""Ulysses context parallelism: cp ranks share a batch, each computes a slice of the sequence, losses see the whole.

    boundary.py          cut at the base model's entry, gather at its exit
    plan.py              padding, documents and masks of the whole sequence, once per forward
    ulysses.py           attention: sequence <-> heads; local_attention.py runs the user's kernel on whole heads
    linear_attention.py  the gated delta rule and its convolution
    exchange.py          the collectives
    checks.py            what cannot be exact is refused by name
    documents.py         cp_size 1: masks for models that would let packed documents read each other
    hooks.py             what the trainer must count once
    sharded_head.py      opt-in for SFT: the LM head on the slice
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from hf_fsdpturbo.context_parallel.boundary import install_boundary, text_models
from hf_fsdpturbo.context_parallel.checks import check_model, requested_attention
from hf_fsdpturbo.context_parallel.documents import keep_documents_apart
from hf_fsdpturbo.context_parallel.linear_attention import conv_reach, install_linear_attention
from hf_fsdpturbo.context_parallel.local_attention import KERNELS
from hf_fsdpturbo.context_parallel.ulysses import register_attention
from hf_fsdpturbo.kernels.rebinding import linear_attention_layers

__all__ = ["check_model", "install", "keep_documents_apart"]


def install(model: Any, cp_mesh: DeviceMesh) -> Callable[[], None]:
    """Make a model context-parallel over ``cp_mesh``, in place; call it before sharding and after kernels are bound.

    Args:
        model: Transformers model, on meta or any device. Its ``attn_implementation`` decides the kernel that runs on
            whole heads.
        cp_mesh: one axis, cp ranks that share a batch.

    Returns:
        A function that takes everything out again.

    Raises:
        ValueError: see :func:`check_model`.
    """
    size = cp_mesh.size()
    check_model(model, size)
    (base,) = text_models(model)
    config: Any = base.config
    requested = requested_attention(config)
    register_attention()
    previous = config._attn_implementation
    config._attn_implementation = KERNELS[requested].key
    undos = [lambda: setattr(config, "_attn_implementation", previous)]
    if any(True for _ in linear_attention_layers(model)):
        undos.append(install_linear_attention(model, size))
    undos.append(install_boundary(base, cp_mesh.get_group(), least_slice=max(conv_reach(model), 1)))

    def undo() -> None:
        for step in reversed(undos):
            step()

    return undo
