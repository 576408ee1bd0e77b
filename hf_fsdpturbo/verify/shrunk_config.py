"""Any model config with small sizes: fields by name, one layer of each kind, ids inside a small vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

VOCAB = 384
FEWEST_LAYERS = 2
LAST_IDS = 40  # of the vocabulary: image, audio and other tokens by name
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")
DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")

Rules = tuple[tuple[str, int | None], ...]
"""``(field, size)``: the field's name is matched whole, the first rule wins; None leaves what there is."""


def size_rules(
    *,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_dim: int | None,
    mamba_head_dim: int | None,
    experts: int,
    top_k: int | None,
    groups: int | None,
    positions: int | None,
    dense_first: int | None,
    shared: int | None,
) -> Rules:
    """Sizes by field for every family of Transformers; None leaves a field as it is."""
    return (
        (r"vocab_size|ngram_vocab_size_base|vocab_size_per_layer_input", VOCAB),
        (r"(moe_|text_)?hidden_size|d_model|output_dim|out_hidden_size|projector_hidden_size", hidden),
        (r"(dense_|mlp_)?intermediate_size|mlp_dim|encoder_ffn_dim|intermediate_size_mlp", 2 * ffn),
        (r"moe_intermediate_size|shared_intermediate_size", ffn),
        (r"(moe_)?shared_experts?_intermediate_size|share_expert_dim", ffn + 8),
        (r"projection_(hidden_dim|intermediate_size)|merged_hidden_size|router_hidden_size", 2 * ffn),
        (r"(swa_)?num_attention_heads|encoder_attention_heads|num_heads|num_sliding_attention_heads", heads),
        (r"(swa_)?num_key_value_heads", kv_heads),
        (r"(swa_)?head_dim|qk_nope_head_dim|v_head_dim|index_head_dim|linear_head_dim", head_dim),
        (r"mamba_(d_head|head_dim)", mamba_head_dim),
        (r"linear_(key|value)_head_dim|d_rel|gated_norm_rank|rotary_dim", head_dim),
        (r"qk_rope_head_dim", head_dim),
        (r"qk_head_dim", None if head_dim is None else 2 * head_dim),
        (r"(q|kv|o)_lora_rank|hc_lowrank|loop_gate_rank", hidden // 2),
        (r"linear_num_(value_)?heads|index_n_heads", heads),
        (r"linear_num_key_heads", kv_heads),
        (r"(moe_)?num_experts|num_local_experts|n_routed_experts", experts),
        (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts", top_k),
        (r"(moe_)?num_shared_experts|n_shared_experts", shared),
        ("|".join(DENSE_FIRST), dense_first),
        (r"n_group|num_expert_group", groups),
        (r"topk_group", None if groups is None else groups // 2),
        (r"max_position_embeddings|model_max_length|index_topk|rel_extent", positions),
        (r"sliding_window(_size)?|chunk_size|mamba_chunk_size|attention_chunk_size", 16),
        (r"mamba_(n_heads|num_heads)", 8),
        (r"(mamba_d|ssm)_state(_size)?", 8),
        (r"mamba_dt_rank", 4),
        (r"depth|encoder_layers", 2),
        (r"image_size", 28),
    )


def shrunk(
    config: Any, rules: Callable[[Any], Rules], given: Mapping[str, Any], *, keep_dense: bool = False, prefix: str = ""
) -> Any:
    """A config of the same class with small sizes.

    Args:
        config: a ``PretrainedConfig``; it stays as it is.
        rules: sizes for a config, called for it and for each below it. Zeros, None and booleans stay what they are.
        given: fields that go before the rules; ``sub.field`` reaches into a sub-config, ``...`` drops what a rule
            says.
        keep_dense: dense layers that come first, or that a list of layer numbers tells from others, are kinds too.
        prefix: where ``config`` stands in ``given``.

    Raises:
        whatever the config's class raises for sizes that it does not take.
    """
    from transformers import PretrainedConfig

    sizes = rules(config)
    fields: dict[str, Any] = {}
    subs = {k: v for k, v in vars(config).items() if isinstance(v, PretrainedConfig)}
    for name, value in vars(config).items():
        if name not in subs and not name.startswith("_"):
            small = _small(name, value, sizes)
            if small is not None:
                fields[name] = small
    fields.update(_few_layers(config, keep_dense))
    if vars(config).get("num_key_value_heads") == vars(config).get("num_attention_heads", 0):
        heads = fields.get("num_attention_heads")  # families without grouped heads, MLA among them
        fields["num_key_value_heads"] = heads if heads is not None else config.num_attention_heads
    for name, sub in subs.items():
        inside = f"{prefix}{name}."
        fields[name] = shrunk(sub, rules, given, keep_dense=keep_dense, prefix=inside).to_dict()
    own = {k[len(prefix) :]: v for k, v in given.items() if k.startswith(prefix)}
    fields.update({k: v for k, v in own.items() if "." not in k})
    return type(config)(**{k: v for k, v in fields.items() if v is not ...})


def _small(name: str, value: Any, rules: Rules) -> Any:
    """The value that a rule gives, None where none speaks."""
    if name == "initializer_range":
        return 0.02
    if isinstance(value, float) and re.search("dropout|jitter", name):
        return 0.0  # a draw of its own on every rank
    if name.endswith(("token_id", "token_index")):
        return _token(name, value)
    if isinstance(value, bool) or not isinstance(value, int) or value == 0:
        return None
    return next((small for pattern, small in rules if re.fullmatch(pattern, name)), None)


def _token(name: str, value: Any) -> Any:
    """Ids inside the small vocabulary: pad, bos, eos are 0, 1, 2, the rest the last ids, one each."""
    if name in SPECIAL:
        return SPECIAL.index(name) if value is not None else None
    if not isinstance(value, int) or value < VOCAB - LAST_IDS:
        return None
    return VOCAB - 2 - sum(name.encode()) % 32


def _few_layers(config: Any, keep_dense: bool) -> dict[str, Any]:
    """One layer of each kind, in the order in which the kinds appear; per-layer lists cut to the same layers."""
    total = getattr(config, "num_hidden_layers", None)
    if not isinstance(total, int):
        return {}
    lists = {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == total and not name.startswith("_")
    }
    members = _members(config, total) if keep_dense else {}
    lists = {name: value for name, value in lists.items() if name not in members}
    field = next((name for name in DENSE_FIRST if keep_dense and isinstance(vars(config).get(name), int)), None)
    dense = vars(config)[field] if field is not None else 0
    kept: dict[tuple[Any, ...], int] = {}
    for layer in range(total):
        kinds = tuple(str(value[layer]) for value in lists.values() if isinstance(value[layer], str))
        kept.setdefault((layer < dense, *(layer in value for value in members.values()), *kinds), layer)
    layers = sorted(kept.values())
    while len(layers) < min(FEWEST_LAYERS, total):
        layers.append(layers[-1])
    cut: dict[str, Any] = {name: [value[layer] for layer in layers] for name, value in lists.items()}
    cut |= {name: [place for place, layer in enumerate(layers) if layer in value] for name, value in members.items()}
    if field is not None:
        cut[field] = sum(layer < dense for layer in layers)
    return {"num_hidden_layers": len(layers), **cut}


def _members(config: Any, total: int) -> dict[str, set[int]]:
    """Lists of layer numbers (``mlp_only_layers``, ``moe_layers``), as sets."""
    found = {}
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)) and value and re.fullmatch(r".*layers?(_ids|_indices)?", name):
            if all(isinstance(n, int) and not isinstance(n, bool) for n in value) and set(value) <= set(range(total)):
                if len(set(value)) == len(value):
                    found[name] = set(value)
    return found
