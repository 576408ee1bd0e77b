"""A tiny config of any family: the class's own defaults, shrunk by field name; every kind of layer stays."""

from __future__ import annotations

import re
from typing import Any

from tests.families.overrides import OVERRIDES

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K = 384, 32, 16, 4, 2, 8, 8, 2
FEWEST_LAYERS = 2

RULES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|ngram_vocab_size_base|vocab_size_per_layer_input", VOCAB),
    (r"(moe_|text_)?hidden_size|d_model|output_dim|out_hidden_size|projector_hidden_size", HIDDEN),
    (r"(dense_|mlp_)?intermediate_size|mlp_dim|encoder_ffn_dim", 2 * FFN),
    (r"moe_intermediate_size|shared_intermediate_size", FFN),
    (r"(moe_)?shared_experts?_intermediate_size|share_expert_dim", FFN + 8),
    (r"projection_(hidden_dim|intermediate_size)|merged_hidden_size|router_hidden_size", 2 * FFN),
    (r"(swa_)?num_attention_heads|encoder_attention_heads|num_heads|num_sliding_attention_heads", HEADS),
    (r"(swa_)?num_key_value_heads", KV_HEADS),
    (r"(swa_)?head_dim|qk_nope_head_dim|v_head_dim|index_head_dim|linear_head_dim", HEAD_DIM),
    (r"linear_(key|value)_head_dim|mamba_(d_head|head_dim)|d_rel|gated_norm_rank|rotary_dim", HEAD_DIM),
    (r"qk_rope_head_dim", HEAD_DIM),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"(q|kv|o)_lora_rank|hc_lowrank|loop_gate_rank", 16),
    (r"linear_num_(value_)?heads|index_n_heads", HEADS),
    (r"linear_num_key_heads", KV_HEADS),
    (r"(moe_)?num_experts|num_local_experts|n_routed_experts", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts", TOP_K),
    (r"(moe_)?num_shared_experts|n_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"max_position_embeddings|model_max_length|index_topk|rel_extent", 512),
    (r"sliding_window(_size)?|chunk_size|mamba_chunk_size", 16),
    (r"mamba_(n_heads|num_heads)", 8),
    (r"(mamba_d|ssm)_state(_size)?", 8),
    (r"mamba_dt_rank", 4),
    (r"depth|encoder_layers", 2),
    (r"image_size", 28),
)
"""``(field, value)``: the field's name is matched whole, the first rule wins. Zeros and None stay what they are."""


def tiny_config(config_class: Any, family: str) -> Any:
    """The shrunk config of a family.

    Args:
        config_class: what ``CONFIG_MAPPING`` has for the model type.
        family: whose overrides apply; a key ``sub.field`` reaches into a sub-config.
    """
    return _shrink(config_class(), OVERRIDES.get(family, {}), prefix="")


def _shrink(config: Any, given: dict[str, Any], prefix: str) -> Any:
    from transformers import PretrainedConfig

    fields: dict[str, Any] = {}
    subs = {k: v for k, v in vars(config).items() if isinstance(v, PretrainedConfig)}
    for name, value in vars(config).items():
        if name not in subs and not name.startswith("_"):
            small = _small(name, value)
            if small is not None:
                fields[name] = small
    fields.update(_few_layers(config))
    if vars(config).get("num_key_value_heads") == vars(config).get("num_attention_heads", 0):
        fields["num_key_value_heads"] = HEADS  # families without grouped heads, MLA among them
    for name, sub in subs.items():
        fields[name] = _shrink(sub, given, prefix=f"{prefix}{name}.").to_dict()
    own = {k[len(prefix) :]: v for k, v in given.items() if k.startswith(prefix)}
    fields.update({k: v for k, v in own.items() if "." not in k})
    fields = {k: v for k, v in fields.items() if v is not ...}
    return type(config)(**fields)


def _small(name: str, value: Any) -> Any:
    """The value that a rule gives, None where none speaks."""
    if name == "initializer_range":
        return 0.02
    if isinstance(value, float) and re.search("dropout|jitter", name):
        return 0.0  # a draw of its own on every rank
    if name.endswith(("token_id", "token_index")):
        return _token(name, value)
    if isinstance(value, bool) or not isinstance(value, int) or value == 0:
        return None
    return next((small for pattern, small in RULES if re.fullmatch(pattern, name)), None)


SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")


def _token(name: str, value: Any) -> Any:
    """Ids inside the small vocabulary: pad, bos, eos are 0, 1, 2, the rest the last ids, one each."""
    if name in SPECIAL:
        return SPECIAL.index(name) if value is not None else None
    if not isinstance(value, int) or value < VOCAB - 40:
        return None
    return VOCAB - 2 - sum(name.encode()) % 32


def _few_layers(config: Any) -> dict[str, Any]:
    """One layer of each kind, in the order in which the kinds appear; per-layer lists cut to the same layers."""
    total = getattr(config, "num_hidden_layers", None)
    if not isinstance(total, int):
        return {}
    lists = {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == total and not name.startswith("_")
    }
    kept: dict[tuple[str, ...], int] = {}
    for layer in range(total):
        kept.setdefault(tuple(str(value[layer]) for value in lists.values() if isinstance(value[layer], str)), layer)
    layers = sorted(kept.values())
    while len(layers) < min(FEWEST_LAYERS, total):
        layers.append(layers[-1])
    cut = {name: [value[layer] for layer in layers] for name, value in lists.items()}
    return {"num_hidden_layers": len(layers), **cut}


def tiny_model(family: Any) -> Any:
    """A float32 model of a :class:`~tests.families.listing.Family`, seeded, with no two parts alike.

    Norm weights, biases and whatever else starts constant is moved off its start, so that a wrong or permuted one is
    seen. What starts at zero in norms is moved by 0.5, and the decay rates of linear attention are made slow: near
    zero and near one relative distances say little.
    """
    import torch
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = tiny_config(transformers.CONFIG_MAPPING[family.model_type], family.name)
        model = getattr(transformers, family.architecture)(config).float()
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *_saved_buffers(model)):
                _unlike(name, tensor)
    model.config.architectures = [family.architecture]
    return model


def _saved_buffers(model: Any) -> list[tuple[str, Any]]:
    saved = model.state_dict(keep_vars=True)
    return [(n, b) for n, b in model.named_buffers() if n in saved and b.is_floating_point()]


def _unlike(name: str, tensor: Any) -> None:
    import torch

    if not torch.isfinite(tensor).all():  # left as the allocator gave it
        tensor.normal_(std=0.02)
    if name.endswith("A_log"):
        tensor.uniform_(0.05, 0.5).log_()
    elif tensor.numel() > 1 and float(tensor.max() - tensor.min()) == 0.0:
        tensor.add_(0.02 * torch.randn_like(tensor))
    if name.endswith("norm.weight") and abs(float(tensor.mean())) < 0.1:
        tensor.add_(0.5)
