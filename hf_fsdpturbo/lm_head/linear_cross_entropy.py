"""Log-probabilities of labels, with the gradients of their sum computed in the forward: three matmuls, not four.

The logits of a tile of tokens become their gradient in place, are multiplied by the head and by the hidden states,
and the tile is used again. A backward that has only the log-probabilities must compute the logits a second time; where
the loss weighs all positions alike, its gradient is that of the sum times one number, which is known in the backward.

Note [Dtypes]. Matmuls run in autocast's dtype, or that of the hidden states. All gradients leave them in float32 and
are rounded once, after the factor: the head's is a sum over tiles (in bf16 it would lose small entries); that of the
hidden states, rounded before and after the factor, was 1.3 to 1.6 times as far from float32 as TRL's.

N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.ops.table import LogitTransform, OpSet, get_ops

# Bytes of logits at once. Each tile reads and writes the head's float32 gradient (2.5 GB at V 151,936, D 2048), so
# tiles are large; where the product for that gradient needs float32 copies of a tile, they are smaller.
_TILE_BYTES = {"cuda": 5 * 2**28}
_SMALL_TILE_BYTES = 2**28
_ROWS = 128  # tiles are multiples of it: what matmul kernels divide their work into


def tile_rows(tokens: int, vocabulary: int, element_bytes: int, device_type: str) -> int:
    """Tokens a tile: as few equal tiles as the bytes allow."""
    limit = max(1, _TILE_BYTES.get(device_type, _SMALL_TILE_BYTES) // (vocabulary * element_bytes * _ROWS)) * _ROWS
    tiles = max(1, -(-tokens // limit))
    return max(1, -(-tokens // (tiles * _ROWS)) * _ROWS)


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    transform: LogitTransform | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target under ``hidden @ weight.T + bias``.

    Args:
        hidden_ND: any float dtype, as the weight.
        targets_N: int64, each in ``0 .. V - 1``.
        transform: what the model does with the product.

    Returns:
        ``(log_probs [N], entropy [N], is_top1 [N])``: float32 (float64 for float64), float32 and bool; a gradient
        flows through ``log_probs`` only.

    Raises:
        ValueError: in the backward, where the gradient of ``log_probs`` is not one number for all positions.
    """
    found: tuple[Tensor, Tensor, Tensor] = _LinearCrossEntropy.apply(
        hidden_ND, weight_VD, bias_V, targets_N, transform or LogitTransform(), get_ops(hidden_ND.device.type)
    )
    return found


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        transform: LogitTransform,
        ops: OpSet,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype
        needed = ctx.needs_input_grad[:3]
        with torch.autocast(kind, enabled=False):
            bias = None if bias_V is None else bias_V.to(dtype)
            sums = _Gradients(hidden_ND.to(dtype), weight_VD.to(dtype), bias, needed, ops)
            log_probs_N, entropy_N, is_top1_N = sums.run(targets_N, transform)
        # Not by save_for_backward: what offloads activations would carry the head's gradient to the host and back.
        ctx.gradients = sums.found
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden_ND, weight_VD, bias_V)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(entropy_N, is_top1_N)
        return log_probs_N, entropy_N, is_top1_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient_N, nothing = gradients[0], (None, None, None)
        if gradient_N is None:
            return *nothing, *nothing
        if ctx.gradients is None:
            raise RuntimeError("The gradients of the LM head are used up: a second backward needs another forward.")
        factor = common_factor(gradient_N)
        found, ctx.gradients = ctx.gradients, None
        scaled = [
            None if tensor is None else _scaled(tensor, factor, dtype)
            for tensor, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return *scaled, *nothing


class _Gradients:
    """One pass over the tokens: results by token, and the gradients that are needed (see Note [Dtypes])."""

    def __init__(
        self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, needed: tuple[bool, ...], ops: OpSet
    ) -> None:
        self.hidden, self.weight, self.bias, self.ops = hidden_ND, weight_VD, bias_V, ops
        wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        new = torch.empty_like if len(hidden_ND) else torch.zeros_like  # the first tile writes it
        self.found: tuple[Tensor | None, ...] = (
            torch.empty_like(hidden_ND, dtype=wide) if needed[0] else None,
            new(weight_VD, dtype=wide) if needed[1] else None,
            torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and needed[2] else None,
        )

    def run(self, targets_N: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor, Tensor]:
        tokens, vocabulary = len(self.hidden), len(self.weight)
        rows = tile_rows(tokens, vocabulary, self.hidden.element_size(), self.hidden.device.type)
        width = -(-vocabulary // 64) * 64  # rows of a tile begin where matmuls and loads like it
        tile = self.hidden.new_empty(min(rows, tokens), width)
        parts = []
        for start in range(0, max(tokens, 1), rows):  # once where no token has a label
            part = slice(start, min(start + rows, tokens))
            logits = tile[: part.stop - start, :vocabulary]
            torch.mm(self.hidden[part], self.weight.t(), out=logits)
            if self.bias is not None:
                logits += self.bias
            parts.append(self.ops.cross_entropy_(logits, targets_N[part], transform))
            if len(logits):
                self._add(logits, part)
        log_probs_N, entropy_N, is_top1_N = (torch.cat(each) for each in zip(*parts, strict=True))
        return log_probs_N, entropy_N, is_top1_N

    def _add(self, gradient_nV: Tensor, part: slice) -> None:
        hidden, weight, bias = self.found
        if hidden is not None:
            self.ops.add_product_(hidden[part], gradient_nV, self.weight, fresh=True)
        if weight is not None:
            self.ops.add_product_(weight, gradient_nV.t(), self.hidden[part], fresh=part.start == 0)
        if bias is not None:
            bias += gradient_nV.sum(0, dtype=bias.dtype)


def _scaled(tensor: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """``tensor * factor`` in ``dtype``, rounded once; the tensor itself is used up where it has that dtype."""
    if tensor.dtype == dtype:
        return tensor.mul_(factor)
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))


def common_factor(gradient_N: Tensor) -> float:
    """The one number that all entries are (0 where there are none); NaN where one is.

    It waits for the device, where TRL's trainer has just waited for its metrics.

    Raises:
        ValueError: they differ.
    """
    if not gradient_N.numel():
        return 0.0
    low, high = torch.stack(torch.aminmax(gradient_N)).tolist()
    if low != high and low == low and high == high:
        raise ValueError(
            f"fused_linear_cross_entropy needs a loss that weighs all positions alike, but the gradients of their "
            f"log-probabilities lie between {low} and {high}. Set fused_linear_cross_entropy='off'."
        )
    return float(low)
