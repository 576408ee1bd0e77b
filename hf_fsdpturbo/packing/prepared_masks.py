"""Packed documents without context parallelism: masks for the models that build theirs without looking at positions.

Most models pass ``position_ids`` to Transformers' mask functions, which then keep packed documents apart; some
(gpt_oss, afmoe in 5.24) do not, and every document reads the ones before it in the row. They take a prepared mask per
kind of layer instead, so that is what they get for a packed batch. Flash attention finds the documents by itself.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_fsdpturbo.code_facts import forward_or_warning, warn
from hf_fsdpturbo.packing.sequence_plan import SequencePlan, block_mask, make_plan
from hf_fsdpturbo.packing.text_models import text_models

KINDS = {"full_attention", "sliding_attention"}
UNKNOWN = "it is not known whether packed documents stay apart: compare a packed row with its documents alone."
KERNELS_WITH_MASKS = ("sdpa", "eager", "flex_attention")


def masks_ignore_documents(module: nn.Module) -> bool:
    """Whether a base model makes its masks from the padding mask alone, and takes prepared ones by layer type.

    Warns with ``HiddenCodeWarning`` where the source cannot tell, because it cannot be read or makes no mask.
    """
    given = _keywords_given(module)
    for_masks = [names for names in given if {"attention_mask", "inputs_embeds", "config"} <= names]
    if given and not for_masks:
        warn(f"{type(module).__name__}.forward calls no mask function of Transformers, so {UNKNOWN}")
    takes_prepared = any(KINDS & names for names in given)
    return bool(for_masks) and takes_prepared and not any("position_ids" in names for names in for_masks)


def _keywords_given(module: nn.Module) -> list[set[Any]]:
    """Names in every call and every literal dictionary of a module's forward; none, and a warning, if unreadable."""
    function = forward_or_warning(module, "whether it keeps packed documents apart")
    if function is None:
        return []
    try:
        source = inspect.getsource(function)
    except OSError:  # made by exec, or its file is gone
        warn(f"{type(module).__name__}.forward has no source, so {UNKNOWN}")
        return []
    given: list[set[Any]] = []
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Dict):
            given.append({key.value for key in node.keys if isinstance(key, ast.Constant)})
        elif isinstance(node, ast.Call):
            given.append({keyword.arg for keyword in node.keywords})
    return given


def _mask(plan: SequencePlan, kernel: str, window: int | None, like: Tensor) -> Any:
    if kernel == "sdpa":
        return plan.mask(window)
    return plan.additive_mask(window, like.dtype) if kernel == "eager" else block_mask(plan, window)


def keep_documents_apart(model: nn.Module) -> None:
    """Give packed batches masks of their own where the model would let documents read each other; others stay."""
    for base in text_models(model):
        if masks_ignore_documents(base):
            base.register_forward_pre_hook(_hook(inspect.signature(type(base).forward)), with_kwargs=True)


def _hook(signature: inspect.Signature) -> Callable[..., Any]:
    def before_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config = module.config
        given = {**kwargs, **signature.bind_partial(module, *args, **kwargs).arguments}
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        mask = given.get("attention_mask")
        if tokens is None or given.get("cache") is not None or config._attn_implementation not in KERNELS_WITH_MASKS:
            return None
        if not (mask is None or isinstance(mask, Tensor) and mask.ndim == 2):
            return None  # prepared by the caller
        plan = make_plan(
            None,
            tokens.shape[0],
            tokens.shape[1],
            tokens.device,
            attention_mask=mask,
            position_ids=given.get("position_ids"),
            cu_seq_lens_q=kwargs.get("cu_seq_lens_q"),
            seq_idx=kwargs.get("seq_idx"),
        )
        if plan.documents is None:
            return None
        like = module.get_input_embeddings().weight
        windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
        masks = {
            kind: _mask(plan, config._attn_implementation, windows[kind], like) for kind in set(config.layer_types)
        }
        named = {name: value for name, value in given.items() if name not in ("self", "kwargs")}
        return (), {**named, **given.get("kwargs", {}), "attention_mask": masks, "use_cache": False}

    return before_forward
