"""Local experts whose frozen weights are in 4 bits, as dispatchers see them: in full for one call, adapters included.

L local experts, r rank, I in, O out features of one expert's matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_fsdpturbo.quantised.fleeting import Fleeting
from hf_fsdpturbo.quantised.packed_weight import PackedWeight, packed_weights
from hf_fsdpturbo.sharding.adapted_experts import AdaptedExperts


class _Sum(torch.autograd.Function):
    """``W + sum of s left right`` that is in ``weight`` already; gradients go to the factors ``[L, ., r], [L, r, .]``.

    It saves nothing by autograd, whose graph of one call's weights several backwards may use: those of trials.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scales: list[float], *factors: Tensor) -> Tensor:
        ctx.scales, ctx.factors = scales, [factor.detach() for factor in factors]
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), found = gradients, []
        for number, scale in enumerate(ctx.scales):
            left, right = ctx.factors[2 * number : 2 * number + 2]
            found.append(torch.bmm(gradient, right.transpose(1, 2)).mul_(scale))
            found.append(torch.bmm(left.transpose(1, 2), gradient).mul_(scale))
        return None, None, *found


class PackedExperts(AdaptedExperts):
    """As the base class; quantised weights are made for each call, between :meth:`open` and :meth:`close`.

    Args:
        module: experts module, or the outermost wrapper of its adapters.
        forward: the forward of the experts module.
        num_local_experts: experts of this rank.

    Attributes:
        compute_as: dtype to compute in; None: in that the weights were stored in.
    """

    compute_as: torch.dtype | None = None

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], num_local_experts: int) -> None:
        super().__init__(module, forward, num_local_experts)
        self.packed = _packed_below(self.module)
        self._call: Fleeting | None = None

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype that the weights had before they were quantised."""
        return next(iter(self.packed.values())).dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.compute_as or self.stored_dtype

    def open(self, rows: Tensor, until_backward: bool) -> Tensor:
        self._call = Fleeting(until_backward)
        return self._call.open(rows)

    def close(self, output: Tensor) -> Tensor:
        assert self._call is not None
        return self._call.close(output)

    def leave(self) -> None:
        if self._call is not None:
            self._call.forget()
        self._call = None

    def adapted(self, name: str, weight: Tensor) -> Tensor:
        """As the base class; of a quantised weight, the same tensor for all of one call."""
        return self._made(name, self.packed[name]) if name in self.packed else super().adapted(name, weight)

    def _made(self, name: str, weight: PackedWeight) -> Tensor:
        assert self._call is not None, "weights in 4 bits are there during a call only"
        dtype = self.compute_dtype
        pairs, scales = [], []
        for wrapper, adapter in self.active(name):
            pairs.append(self.factors(wrapper, adapter, dtype))  # views of what FSDP gathers again for backward
            scales.append(float(wrapper.scaling[adapter]))
        kept = [(left.detach(), right.detach()) for left, right in pairs]

        def fill(out: Tensor) -> None:
            weight.write(out)
            with torch.no_grad():
                for (left, right), scale in zip(kept, scales, strict=True):
                    out.baddbmm_(left, right, alpha=scale)

        def connect(out: Tensor) -> Tensor:
            flat = [factor for pair in pairs for factor in pair]
            return _Sum.apply(out, scales, *flat) if flat else out

        def new() -> Tensor:
            return torch.empty(weight.local_shape(), dtype=dtype, device=weight.device())

        return self._call.make(name, new, fill, connect)


def _packed_below(experts: nn.Module) -> dict[str, PackedWeight]:
    """Quantised weights of an experts module by their names below it."""
    return {
        f"{path}.{name}" if path else name: weight
        for path, module in experts.named_modules()
        for name, weight in packed_weights(module).items()
    }


def has_packed_experts(experts: nn.Module) -> bool:
    """Whether an experts module (without its adapters' wrappers) has weights in 4 bits."""
    return bool(_packed_below(experts))
