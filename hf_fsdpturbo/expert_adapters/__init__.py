"""Families whose own code calls experts in another way than the field does: one file a family, by two functions."""

from __future__ import annotations

from hf_fsdpturbo.expert_adapters.convention import adapt_block, adapt_experts, grouped_swiglu

__all__ = ["adapt_block", "adapt_experts", "grouped_swiglu"]
