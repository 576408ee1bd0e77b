"""The small copy of a user's model: the same class, every kind of layer, heads as they are, few experts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fsdpturbo.verify.shrunk_config import SPECIAL, VOCAB, Rules, shrunk, size_rules
from hf_fsdpturbo.verify.users_config import REFUSALS, architecture, first_of, short

HIDDEN, FFN = 64, 48  # unequal, with their sums and multiples, so that a swapped dim is seen; 16 ranks divide both
AUX_LOSS = 0.05  # the usual 0.001 would hide a wrong factor below the tolerance
TOP_K_FIELDS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
GROUP_FIELDS = ("n_group", "num_expert_group")
FEW_HEADS = 2
LOUDER = 3.0  # experts as drawn add so little to the stream that a loss hardly tells one from another


def few_experts(config: Any, ep_size: int) -> int:
    """The smallest multiple of ``ep_size`` above top-k, two or more a rank.

    Groups of experts (DeepSeek-V3) stay as many, each with two experts or more, and those that a token may choose
    from hold more than top-k.

    Args:
        config: the text model's.
        ep_size: ranks that share them.
    """
    top_k = first_of(config, TOP_K_FIELDS, 2)
    groups, chosen = first_of(config, GROUP_FIELDS, 1), first_of(config, ("topk_group",), 1)
    step = math.lcm(ep_size, groups)
    least = max(top_k + 1, 2 * ep_size)
    if groups > 1:
        least = max(least, 2 * groups, groups * math.ceil((top_k + 1) / chosen))
    return step * math.ceil(least / step)


def few_heads(config: Any, cp_size: int) -> tuple[int, int]:
    """``(attention heads, key-value heads)``: few, grouped where the model's are, enough for cp_size."""
    heads = first_of(config, ("num_attention_heads",), 4)
    kv_heads = first_of(config, ("num_key_value_heads",), heads)
    if kv_heads >= heads:
        few = min(heads, max(FEW_HEADS, cp_size))
        return few, few
    few_kv = min(kv_heads, max(FEW_HEADS, cp_size))
    return few_kv * min(heads // kv_heads, max(2, math.ceil(cp_size / few_kv))), few_kv


def small_config(config: Any, ep_size: int, cp_size: int, given: dict[str, Any] | None = None) -> Any:
    """The shrunken config.

    Args:
        config: the user's.
        ep_size: ranks that will share the experts.
        cp_size: ranks that will share the heads.
        given: fields that go before the rules, as :func:`~hf_fsdpturbo.verify.shrunk_config.shrunk` takes them.

    Raises:
        ValueError: the class refuses every such size.
    """
    from huggingface_hub.errors import StrictDataclassError

    text = config.get_text_config()
    heads, kv_heads = few_heads(text, cp_size)
    head_dim = vars(text).get("head_dim") or vars(text).get("qk_nope_head_dim")
    own = vars(text).get("num_attention_heads")
    hidden = HIDDEN if head_dim or not own else heads * (text.hidden_size // own)
    expand = first_of(text, ("mamba_expand",), 2)

    def rules(one: Any) -> Rules:
        is_text = one is text or one.get_text_config() is text
        return size_rules(
            hidden=hidden, ffn=FFN, heads=heads if is_text else 4, kv_heads=kv_heads if is_text else 2, head_dim=None,
            mamba_head_dim=expand * hidden // 8, experts=few_experts(text, ep_size), top_k=None, groups=None,
            positions=None, dense_first=None, shared=None,
        )  # fmt: skip

    try:
        small = shrunk(config, rules, given or {}, keep_dense=True)
    except (*REFUSALS, StrictDataclassError) as error:
        raise ValueError(
            f"MODEL: {type(config).__name__} takes no small sizes ({short(error)}). Give a config.json of a small "
            "model of yours."
        ) from error
    inner = small.get_text_config()
    if vars(inner).get("router_aux_loss_coef"):
        inner.router_aux_loss_coef = AUX_LOSS
    return small


@dataclass(frozen=True)
class SmallModel:
    """What was saved.

    Attributes:
        folder: where.
        architecture: name of the class.
        sizes: for people.
        kinds: the same, kinds of layers kept of those that the user's model has.
        experts: of a layer.
        has_aux_loss: whether TRL adds a router loss.
    """

    folder: str
    architecture: str
    sizes: str
    kinds: str
    experts: int
    has_aux_loss: bool


def layer_kinds(model: Any) -> set[tuple[Any, ...]]:
    """What tells decoder layers apart: names and classes of their parts (not of single experts), and attention."""
    from hf_fsdpturbo.sharding.outer_fsdp import decoder_layers

    return {(_parts(layer), _attention(layer)) for layer in decoder_layers(model)}


def _parts(layer: Any) -> tuple[tuple[str, str], ...]:
    named = [(name, type(part).__name__) for name, part in layer.named_modules() if name]
    return tuple((name, kind) for name, kind in named if not any(map(str.isdecimal, name.split("."))))


def _attention(layer: Any) -> str | None:
    for module in layer.modules():
        if isinstance(kind := getattr(module, "layer_type", None), str):
            return kind
        if getattr(module, "sliding_window", None) is not None:
            return "sliding"
    return None


def save_small(config: Any, whole: Any, folder: Path, seed: int = 0, command: str = "sft") -> SmallModel:
    """Make the small model at random and save it as its family is released, with a tokenizer.

    Args:
        config: from :func:`small_config`.
        whole: the user's config.
        folder: an empty one.
        seed: of the weights.
        command: ``reward`` makes a reward model with a head.

    Raises:
        ValueError: no experts, or Transformers cannot build the class.
    """
    import torch
    import transformers

    from hf_fsdpturbo.model_spec import find_experts
    from hf_fsdpturbo.verify.random_weights import random_weights

    name = architecture(whole, command)
    if command == "reward":
        config.update({"num_labels": 1})
        config.get_text_config().update({"pad_token_id": SPECIAL.index("pad_token_id")})
    kind = getattr(transformers, name)
    try:
        model = random_weights(lambda: kind(config), seed)
        with torch.device("meta"):
            there = layer_kinds(kind(whole))
    except REFUSALS as error:
        raise ValueError(f"MODEL: Transformers builds no {name} of small sizes ({short(error)}).") from error
    experts = find_experts(model, 1)
    if not experts:
        raise ValueError(
            f"MODEL: {name} has no experts that hf_fsdpturbo knows, and verify is for MoE models. Register them "
            "(docs/register.md), or give another model."
        )
    with torch.no_grad():
        for module in experts.values():
            for parameter in module.parameters():
                parameter.mul_(LOUDER)
    model.config.architectures = [name]
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    kept = layer_kinds(model)
    text = config.get_text_config()
    sizes = f"{text.num_hidden_layers} layers, hidden {text.hidden_size}, {few_count(experts)} experts"
    has_aux = hasattr(text, "output_router_logits") and bool(getattr(text, "router_aux_loss_coef", 0.0))
    has_aux = has_aux and command != "reward"  # TRL's reward trainer adds none
    kinds = f"{len(there & kept)} of {len(there)} kinds of layers"
    return SmallModel(str(folder), name, sizes, kinds, few_count(experts), has_aux)


def few_count(experts: dict[str, Any]) -> int:
    """How many experts the modules have, the largest."""
    from hf_fsdpturbo.sharding.expert_parallel import check_experts as count

    return max(count(module, name, 1) for name, module in experts.items())


def small_tokenizer() -> Any:
    """A word a token, ``w5`` is 5: TRL's DPO reads text by it (``made_data.py``), else ids are given."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    words = {f"<{name.split('_')[0]}>": index for index, name in enumerate(SPECIAL)}
    words["<unk>"] = len(words)  # a special token, so no beginning of another word
    words |= {f"w{index}": index for index in range(len(words), VOCAB)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    written = json.dumps({"pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model})
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(written),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=4096,
    )
