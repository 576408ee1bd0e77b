"""The LM head of SFT: loss and gradients in one pass over the logits, in place of TRL's fused head."""

from __future__ import annotations

from hf_fsdpturbo.lm_head.fused_head import install_fused_head

__all__ = ["install_fused_head"]
