"""Device operators of the dispatchers behind one table: one file per device, the same functions in each.

T tokens, K top-k, R rows, S slots (pairs held by a rank, sorted by expert), E / L all / local experts, P ranks of the
ep axis, X = E + P, D hidden, F ffn.

A *slot map* ``[R, K]`` (int32) says where copies of row r stand: ``slots[r, k]`` is a row number of the expanded
tensor, or -1 for no copy. Scattering rows by it is the permutation, summing through it is the inverse, so that forward
and backward of both need one small map and no sort.

Functions here are plain: no autograd. ``functional.py`` has the operators with gradients, ``expert_mlp.py`` the whole
expert block that keeps few activations.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from hf_fsdpturbo.ops.adamw import AdamWNumbers, AdamWTensors


@dataclass(frozen=True)
class Routing:
    """Where this rank's (token, expert) pairs go, counted on this rank alone.

    Attributes:
        index_TK: expert of each pair, as given.
        rank_TK: number of this rank's earlier pairs for the same expert, int32.
        pair_row_TK: row that carries the pair: one row per (token, destination rank), rows sorted by destination.
        row_position_TK: the same on the first pair of each row and -1 elsewhere: the slot map of the rows.
        totals_X: pairs per expert, then rows per destination rank, int32. Rows are counted where P > 1 only.
    """

    index_TK: Tensor
    rank_TK: Tensor
    pair_row_TK: Tensor
    row_position_TK: Tensor
    totals_X: Tensor


@dataclass(frozen=True)
class LogitTransform:
    """What a model does with the product of hidden states and head: ``cap * tanh(scale * y / cap) / temperature``.

    Attributes:
        scale: factor of the product.
        softcap: None for no cap.
        temperature: what the result is divided by.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


class OpSet(Protocol):
    """What each device file provides."""

    def count_routing(self, index_TK: Tensor, num_experts: int, ep_size: int) -> Routing:
        """Sort pairs without moving them: ranks within experts and rows within destinations."""

    def slot_pairs(self, routing: Routing, totals_PX: Tensor, ep_rank: int) -> tuple[Tensor, Tensor]:
        """The slot of each pair on the rank that owns its expert, and the ends of this rank's experts.

        Slots are sorted by expert, then source rank.

        Returns:
            ``(slots_TK, offsets_L)``, both int32.
        """

    def own_slots(self, index_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """:meth:`slot_pairs` where one rank has all experts: ``(slots_TK, offsets_L)``, both int32."""

    def write_pairs(
        self, routing: Routing, slots_TK: Tensor, weights_TK: Tensor, out_slots: Tensor, out_weights: Tensor
    ) -> None:
        """Write beside each row its K slots (-1 for pairs that another row carries) and weights (0 there)."""

    def scatter_rows(
        self,
        rows_RD: Tensor,
        slots_RK: Tensor,
        out_SD: Tensor,
        weights_RK: Tensor | None = None,
        out_weights_S: Tensor | None = None,
        *,
        roomy: bool = False,
    ) -> None:
        """``out[slots[r, k]] = rows[r]``, and ``out_weights[slots[r, k]] = weights[r, k]``.

        Every row of ``out`` is some slot, unless ``roomy``: then it may have more, with any content.
        """

    def gather_sum(
        self,
        rows_SD: Tensor,
        slots_RK: Tensor,
        out_RD: Tensor,
        values_S: Tensor | None = None,
        out_values_RK: Tensor | None = None,
    ) -> None:
        """``out[r] = sum_k rows[slots[r, k]]``, summed in float32 (float64 for float64).

        And ``out_values[r, k] = values[slots[r, k]]``, or 0 where there is no slot.
        """

    def grouped_mm(self, left: Tensor, right: Tensor, offsets_L: Tensor) -> Tensor:
        """Multiply by group: ``[S, A]`` and ``[L, A, B]`` give ``[S, B]``; ``[A, S]`` and ``[S, B]`` ``[L, A, B]``.

        Group g is ``offsets[g - 1] : offsets[g]``; S must equal ``offsets[-1]``. An empty group gives zeros.
        """

    def supports(self, gate_up: Tensor, down: Tensor) -> bool:
        """Whether :meth:`grouped_mm` takes these weights (dtype, and row strides of a multiple of 16 bytes)."""

    def swiglu(self, gate_up_SF: Tensor, weights_S: Tensor | None) -> Tensor:
        """``silu(g) * u * w`` of ``[S, 2F]`` (gate first) -> ``[S, F]``, computed in float32."""

    def swiglu_backward(
        self, gate_up_SF: Tensor, weights_S: Tensor | None, gradient_SF: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(gradient of [S, 2F], gradient of the weights [S] float32, the forward's output again [S, F])``."""

    def scale_(self, tensors: list[Tensor], factor: Tensor) -> None:
        """Multiply tensors of one device in place by a scalar tensor, in float32, without a host sync."""

    def square_sum(self, tensors: list[Tensor]) -> Tensor:
        """Sum of the squares of all elements in float32: a scalar on the device of the tensors, of which one is."""

    def adamw_(self, tensors: list[AdamWTensors], numbers: AdamWNumbers, factor: Tensor | None = None) -> None:
        """One AdamW step in place on tensors of one device, without a host sync.

        Args:
            tensors: none of them empty.
            numbers: hyperparameters at this step.
            factor: float32 scalar on any device that multiplies gradients as they are read; they stay as they are.
        """

    def cross_entropy_(
        self, logits_NV: Tensor, targets_N: Tensor, transform: LogitTransform
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Overwrite ``logits`` (the plain product) by the gradient of ``sum(log_probs)`` with respect to it.

        Rows of ``logits`` may be further apart than V.

        Returns:
            for each row ``(log-probability of its target, entropy, whether the target is the first of the largest)``;
            float32 (float64 for float64), float32, bool.
        """

    def router_load(self, logits_TE: Tensor, top_k: int, mask_T: Tensor | None, probs_TE: Tensor) -> Tensor:
        """How often experts are among the ``top_k`` most probable, and the sum of their probabilities: ``[2, E]``.

        Args:
            logits_TE: rows may be further apart than E.
            mask_T: float32 weights of tokens, None where each counts once.
            probs_TE: gets the softmax, in its own dtype (that is what is compared and summed); contiguous.

        Returns:
            float32.
        """

    def router_load_backward(self, probs_NE: Tensor, slope_E: Tensor, mask_T: Tensor | None, out_NE: Tensor) -> None:
        """Gradient of ``sum_n mask[n mod T] (slope . probs[n])`` with respect to the logits, written to ``out``.

        Args:
            probs_NE: softmax of the rows of one or more layers of T tokens; contiguous, as ``out_NE``.
            slope_E: float32.
        """

    def add_product_(self, sum_AB: Tensor, left_AN: Tensor, right_NB: Tensor, *, fresh: bool = False) -> None:
        """``sum += left @ right``, added up in the dtype of ``sum``, which may be wider than that of the factors.

        ``fresh``: what ``sum`` held counts as zero, whatever it was.
        """


# Device type -> the file that serves it.
OPS: dict[str, str] = {
    "cpu": "hf_fsdpturbo.ops.torch",
    "cuda": "hf_fsdpturbo.ops.triton",
    "npu": "hf_fsdpturbo.ops.npu",
}


def get_ops(device_type: str) -> OpSet:
    """The operators of a device type.

    Raises:
        ValueError: the table has no such device; names those it has.
    """
    if device_type not in OPS:
        raise ValueError(
            f"device {device_type!r} has no operators for ep_dispatcher='fused'. Known: {sorted(OPS)}; "
            "ep_dispatcher='eager' runs anywhere."
        )
    return cast(OpSet, importlib.import_module(OPS[device_type]))
