"""Recompute of a run: what it replays, with ``recompute="selective"`` what it keeps, and how much memory that takes.

T tokens of a rank in a micro-batch, K top-k, D hidden, F ffn, P ranks of the ep axis, H heads of X elements.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from hf_fsdpturbo.dispatch.kept_attention import keep_attention
from hf_fsdpturbo.dispatch.recompute import install_routing_tape
from hf_fsdpturbo.sharding.expert_lora import base_module
from hf_fsdpturbo.sharding.expert_parallel import is_plain_swiglu
from hf_fsdpturbo.topology import Topology

if TYPE_CHECKING:
    from hf_fsdpturbo.arguments import FSDPTurboArguments

KEEPING_DISPATCHERS = ("fused", "domino", "auto")


def install_recompute(
    model: Any, args: FSDPTurboArguments, topology: Topology, experts: Collection[str], dispatcher: str
) -> list[str]:
    """Make activation checkpointing of ``model`` replay routing and keep what ``recompute`` says.

    Args:
        model: with its attention and experts as they will run.
        args: ``recompute`` and, for the memory, dtype and sizes of a batch.
        topology: sizes of the run.
        experts: names of the experts modules that a dispatcher serves.
        dispatcher: its name.

    Returns:
        lines for the summary: what is kept of which layers, and its size.
    """
    selective = args.recompute == "selective"
    install_routing_tape(model, experts, keeps=selective, alone=topology.world_size == 1)
    kept, again = keep_attention(model) if selective else (set(), set())
    if not (selective and getattr(args, "activation_checkpointing", False)):
        return []
    modules = [base_module(model.get_submodule(name)) for name in experts]
    served = modules if dispatcher in KEEPING_DISPATCHERS else []
    plain = [module for module in served if is_plain_swiglu(module)]
    config = model.config.get_text_config()
    itemsize = 2 if getattr(args, "bf16", False) else next(model.parameters()).dtype.itemsize
    layers = attention_layers(config) if kept else 0
    pairs = sum(choices(config) * (module.get_parameter("gate_up_proj").shape[1] * itemsize + 4) for module in plain)
    stages = {topology.ep_size, 1 if dispatcher == "domino" else topology.ep_nodes}  # between nodes, and inside one
    rows = len(served) * sum(row_bytes(config.hidden_size, choices(config), stage, itemsize) for stage in stages)
    a_token = layers * attention_bytes(config, itemsize) + pairs + rows
    lines = [
        f"recompute selective keeps, forward to backward, outputs of {len(plain)} up matmuls and {layers} attentions"
        f"{f', rows of {len(served)} exchanges' if rows else ''}, {_amount(a_token, args, topology.cp_size)}"
    ]
    if len(plain) < len(modules):
        why = f"ep_dispatcher={dispatcher}" if not plain else "they are not a plain gated SwiGLU"
        lines.append(f"recompute selective: {len(modules) - len(plain)} expert modules run again ({why})")
    if again:
        lines.append(f"recompute selective: attention {', '.join(sorted(again))} runs again, nothing of it is kept")
    return lines


def attention_layers(config: Any) -> int:
    """Layers with softmax attention; linear attention is made again."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum(kind != "linear_attention" for kind in kinds)


def attention_bytes(config: Any, itemsize: int) -> int:
    """Bytes a token and layer of attention's output, H X elements, and its float32 logsumexp, H."""
    heads = config.num_attention_heads
    size = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * (size * itemsize + 4)


def choices(config: Any) -> int:
    """Experts a token is sent to."""
    return int(getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1)


def row_bytes(hidden: int, top_k: int, ep_size: int, itemsize: int) -> int:
    """Bytes a token and layer of the rows that came from other ranks: D elements, K slots and K weights each.

    A rank receives, on average, as many as it sends: one for all choices of a token that are on one rank. Of K choices
    among P ranks ``P (1 - (1 - 1 / P)^K)`` are different ranks.
    """
    if ep_size == 1:
        return 0
    return round(ep_size * (1 - (1 - 1 / ep_size) ** top_k) * (hidden * itemsize + 8 * top_k))


def _amount(a_token: int, args: Any, cp_size: int) -> str:
    """Per 1,024 tokens, and for a micro-batch where its length is known."""
    said = f"{1024 * a_token / 2**30:.3f} GiB for 1,024 tokens of a rank"
    length, batch = getattr(args, "max_length", None), args.per_device_train_batch_size
    if not isinstance(length, int):
        return said
    whole = f"{batch} x {length} tokens" if cp_size == 1 else f"{batch} x {length} / {cp_size} tokens"
    return f"{said}, {a_token * batch * length / cp_size / 2**30:.2f} GiB for {whole}"
