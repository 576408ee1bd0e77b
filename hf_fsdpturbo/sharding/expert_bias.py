"""Biases of experts in half precision: each row's gradient is a sum over thousands of tokens, taken in float32.

Transformers gives every row its expert's bias by ``bias[expert_ids]``, whose backward adds row by row in the bias's
dtype: of 4,096 ones in bf16 it makes 256. CUDA sorts the rows first and still rounds at each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


class _RowsOfBias(torch.autograd.Function):
    """``bias [L, F]``, ``expert_S`` -> ``[S, F]``; backward is a matmul, which accumulates in float32 everywhere."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, expert_S: Tensor) -> Tensor:
        ctx.save_for_backward(expert_S)
        ctx.num_experts = bias.shape[0]
        return bias.index_select(0, expert_S)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (expert_S,) = ctx.saved_tensors
        every_expert = torch.arange(ctx.num_experts, device=expert_S.device, dtype=expert_S.dtype)
        belongs_LS = (every_expert[:, None] == expert_S).to(gradients[0].dtype)
        return belongs_LS @ gradients[0], None


class _IndexedBias(Tensor):
    """A bias as the experts' code sees it for one call: a list of rows is taken by :class:`_RowsOfBias`."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[0], cls) and _is_list_of_rows(args[1]):
            return _RowsOfBias.apply(*args)
        return Tensor.__torch_function__(func, (), args, kwargs or {})  # results are plain tensors


def _is_list_of_rows(index: Any) -> bool:
    return isinstance(index, Tensor) and index.ndim == 1 and index.dtype in (torch.int32, torch.int64)


def summed_in_float32(local: dict[str, Tensor]) -> dict[str, Tensor]:
    """Local parameters of experts by name, biases ``[L, F]`` in half precision so that their rows add up right."""
    return {
        name: weight.as_subclass(_IndexedBias) if weight.ndim == 2 and weight.dtype in HALF else weight
        for name, weight in local.items()
    }
