"""What a layer keeps from forward to backward, and what its backward works with beside that.

Letters: T tokens of a rank in a micro-step, K top-k, D hidden, F ffn, P ranks of the ep axis, b bytes of bf16, s bytes
of the stream between layers. Each figure is bytes a token of one layer unless it says otherwise.
"""

from __future__ import annotations

from typing import Any

from hf_fsdpturbo.parallelize.kept_activations import KEEPING_DISPATCHERS, attention_bytes, choices, row_bytes
from hf_fsdpturbo.plan.planned_run import PlannedRun
from hf_fsdpturbo.plan.shape import ModelShape, Unit

_DELTA_RULE_CHUNK = 64


def norm_bytes(width: int, run: PlannedRun, stored: int) -> int:
    """A norm keeps its input; without a fused one also that in float32, before and after scaling."""
    return width * (stored if run.liger else 4 + stored)


def kept_by_attention(unit: Unit, config: Any, run: PlannedRun) -> int:
    """From the projections' outputs to the input of the last one."""
    b = run.compute_bytes
    if unit.is_linear_attention:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        expanded = 2 * config.linear_num_value_heads * config.linear_key_head_dim
        states = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        return b * (2 * (2 * keys + values) + expanded + 4 * values + states // _DELTA_RULE_CHUNK)
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        latent = (config.q_lora_rank or 0) + config.kv_lora_rank + config.qk_rope_head_dim
        queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        values = heads * (config.qk_nope_head_dim + config.v_head_dim)  # one projection gives keys and values
        return norm_bytes(latent, run, b) + b * (latent + 2 * queries + values) + attention_bytes(config, b)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv = (getattr(config, "num_key_value_heads", None) or heads) * size
    kept = b * (heads * size + 2 * kv) + attention_bytes(config, b)
    if unit.has_qk_norm:
        kept += norm_bytes(heads * size + kv, run, b)
    gated = any(name.endswith("q_proj") and out == 2 * heads * size for name, (_, out) in unit.linears.items())
    return kept + (2 * b * heads * size if gated else 0)


def is_fused(unit: Unit, run: PlannedRun) -> bool:
    """Whether our expert block runs, which keeps rows and the up matmul's output alone."""
    return run.dispatcher in KEEPING_DISPATCHERS and all(experts.is_plain for experts in unit.experts)


def received_rows(config: Any, run: PlannedRun) -> int:
    """Bytes of the rows that came from other ranks; over nodes they pass a rank of the node as well."""
    stages = {run.topology.ep_size}
    if run.dispatcher == "fused":
        stages.add(run.topology.ep_nodes)
    return sum(row_bytes(config.hidden_size, choices(config), stage, run.compute_bytes) for stage in stages)


def kept_by_experts(unit: Unit, config: Any, run: PlannedRun) -> int:
    """Of the routed experts, the router's probabilities included."""
    b, top_k, total = run.compute_bytes, choices(config), 0
    for experts in unit.experts:
        total += 8 * experts.num_experts  # logits and probabilities, float32
        if getattr(config, "n_routed_experts", None):  # DeepSeek's and GLM's router reads its rows in float32
            total += 4 * config.hidden_size
        if is_fused(unit, run):
            total += top_k * (2 * experts.ffn * b + 4)
        else:
            total += top_k * b * (2 * config.hidden_size + 4 * experts.ffn)
        if run.topology.ep_size > 1 and run.dispatcher in KEEPING_DISPATCHERS:  # eager's rows are those in slots
            total += received_rows(config, run)
    return total


def kept_by_linears(unit: Unit, run: PlannedRun) -> int:
    """Of a dense MLP or a shared expert: gate, up, silu and product (the input is the norm's output)."""
    names = {name: out for name, (_, out) in unit.linears.items() if name.endswith(("up_proj", "gate_up_proj"))}
    gated = sum(out // 2 if name.endswith("gate_up_proj") else out for name, out in names.items())
    return 4 * gated * run.compute_bytes


def kept_whole(unit: Unit, shape: ModelShape, run: PlannedRun) -> int:
    """Of a layer that is not recomputed: two norms and their outputs, attention, MLP, experts."""
    hidden = shape.config.hidden_size
    norms = 2 * (norm_bytes(hidden, run, run.stream_bytes) + hidden * run.compute_bytes)
    return (
        norms
        + kept_by_attention(unit, shape.config, run)
        + kept_by_linears(unit, run)
        + kept_by_experts(unit, shape.config, run)
    )


def kept(unit: Unit, shape: ModelShape, run: PlannedRun) -> int:
    """Of a layer as ``recompute`` has it."""
    if run.recompute == "off":
        return kept_whole(unit, shape, run)
    entry = shape.config.hidden_size * run.stream_bytes + 4 * choices(shape.config)
    if run.recompute == "full":
        return entry
    attention = 0 if unit.is_linear_attention else attention_bytes(shape.config, run.compute_bytes)
    return entry + attention + (kept_by_experts(unit, shape.config, run) if is_fused(unit, run) else 0)


def exchanged_rows(unit: Unit, config: Any, run: PlannedRun) -> int:
    """Rows on their way in a layer's backward: gradients that come, those that leave, and their packed copy."""
    if run.topology.ep_size == 1 or not unit.experts:
        return 0
    rows = received_rows(config, run)
    return 3 * (rows if run.dispatcher in KEEPING_DISPATCHERS else choices(config) * config.hidden_size * 2)


def worked_with(unit: Unit, config: Any, run: PlannedRun) -> tuple[int, int]:
    """A layer's backward beside what it kept, ``(before, with)`` the gradient of the experts' up matrices.

    Before: the outputs' gradient and SwiGLU's in slots, K (D + 4F). With: rows again and the up output's gradient.
    Both hold three gradients of the stream.
    """
    b, hidden = run.compute_bytes, config.hidden_size
    stream = 3 * hidden * run.stream_bytes
    if not unit.experts:
        gated = kept_by_linears(unit, run)
        return stream + gated, stream + gated
    ffn = max(experts.ffn for experts in unit.experts)
    top_k = choices(config) * b
    extra = 0 if is_fused(unit, run) else top_k * hidden
    return stream + extra + top_k * (hidden + 4 * ffn), stream + extra + top_k * (hidden + 2 * ffn)
