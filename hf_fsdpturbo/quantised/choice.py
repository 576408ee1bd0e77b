"""Which weights are quantised: linear layers as Transformers with bitsandbytes chooses them, and stacked experts.

Plain leaves experts that are stacked in full, as no linear layer holds them: most of such a model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from hf_fsdpturbo.quantised.asked import FourBit
from hf_fsdpturbo.quantised.four_bit import BLOCK

Choice = dict[str, tuple[nn.Module, str]]
"""By full name of a weight: its module, and its name there."""


def choose(
    model: Any, asked: FourBit, stacks: Mapping[str, tuple[str, ...]], routers: Collection[nn.Module] = ()
) -> Choice:
    """Weights of a model (on meta or not) that are to be quantised, in model order.

    Args:
        model: a Transformers model without adapters.
        asked: what was asked for; its ``skip`` takes the place of what Transformers leaves out by itself.
        stacks: names of the stacks of every experts module, by the module's name.
        routers: modules that choose experts: they stay in full.

    Raises:
        ValueError: a row is not whole blocks; nothing is left to quantise. Names layer, size, rule, fix.
    """
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    skip = list(asked.skip) if asked.skip is not None else get_keys_to_not_convert(model)
    skip += list(getattr(model, "_keep_in_fp32_modules", None) or ())
    in_full = {below for router in routers for below in router.modules()}
    found: Choice = {}
    for name, module in model.named_modules():
        if not should_convert_module(name, skip):
            continue
        for stack in stacks.get(name, ()):
            path, _, leaf = stack.rpartition(".")
            owner = module.get_submodule(path)
            if owner.get_parameter(leaf).ndim == 3:  # biases stay
                found[f"{name}.{stack}"] = owner, leaf
        if isinstance(module, nn.Linear) and module not in in_full:
            found[f"{name}.weight"] = module, "weight"
    for name, (module, leaf) in found.items():
        if (columns := module.get_parameter(leaf).shape[-1]) % BLOCK:
            raise ValueError(
                f"load_in_4bit: {name} has rows of {columns} elements, which are not whole blocks of {BLOCK}. Leave "
                f"the module out: llm_int8_skip_modules=['lm_head', {name.rpartition('.')[0]!r}]."
            )
    if not found:
        raise ValueError(
            f"load_in_4bit: nothing of {type(model).__name__} is left to quantise (llm_int8_skip_modules="
            f"{list(asked.skip or ())}). Name fewer modules there, or leave load_in_4bit out."
        )
    return found
