"""``RealTokens``: which rows of the forward that runs now are real tokens, each once over all ranks and passes.

B batch, S whole sequence, s the positions that this rank computes (all of them without context parallelism), T = B * s
rows that reach the layers of a rank.

Note [A token counts once]. What does not count:

* recompute: activation checkpointing runs a layer again inside backward, whoever asked for it;
* evaluation, generation (``training`` is off), and a reference model's pass (no gradients are recorded);
* padding: by the batch's attention mask, and what context parallelism adds to make S divisible. Packed and
  padding-free rows have no mask, and no padding;
* the other cp ranks' slices: each counts the s positions that it computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fsdpturbo.context_parallel.boundary import CutForward
from hf_fsdpturbo.packing.sequence_plan import padded_length
from hf_fsdpturbo.packing.text_models import text_models


def counts_now(module: nn.Module) -> bool:
    """Whether what ``module`` is given now counts: training, with gradients, and no recompute."""
    return module.training and torch.is_grad_enabled() and not in_backward()


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, where only recompute runs forwards."""
    return torch._C._current_graph_task_id() != -1


class RealTokens:
    """The rows of one model's forwards.

    Args:
        device: where totals are kept.
        window: keys that a token of a sliding layer sees, where the model has such layers.

    Attributes:
        rows: T of the forward that runs, or ran last.
        real_T: bool, False at padding; None where every row is a token.
        totals: int64 ``[3]`` on ``device``, of this rank since it was made: its tokens, the keys that they attend to
            in a causal layer (1 for a document's first token), and those inside ``window``. Nobody waits for them.
    """

    def __init__(self, device: torch.device, window: int | None = None) -> None:
        self.rows = 0
        self.window = window
        self.real_T: Tensor | None = None
        self.totals = torch.zeros(3, dtype=torch.int64, device=device)
        self._pairs: dict[tuple[int, int], Tensor] = {}  # of the forward that runs: all layers ask for the same
        self._outer_mask: Any = None  # of the whole model: some hand layers a prepared mask, not the padding mask

    def attach(self, model: nn.Module) -> list[Any]:
        """Watch a model's forwards from now on; returns handles that end it."""
        handles = []
        for base in text_models(model) or [model]:
            seen = _with_names(base, self._saw_layers)
            handles.append(base.register_forward_pre_hook(seen, with_kwargs=True, prepend=True))
        seen = _with_names(model, self._saw_model)
        handles.append(model.register_forward_pre_hook(seen, with_kwargs=True, prepend=True))
        handles.append(model.register_forward_hook(self._left_model, always_call=True))
        return handles

    def weights(self, rows: int, token_of_row: Tensor | None = None) -> Tensor | None:
        """``[rows]`` bool, whether each row that a block is given is of a real token; None where all are.

        Args:
            rows: how many the block has.
            token_of_row: ``[rows]`` int64, where they are not the T rows themselves. Other rows that are not T cannot
                be told from padding: they all count.
        """
        if self.real_T is None or token_of_row is None and rows != self.rows:
            return None
        return self.real_T if token_of_row is None else self.real_T[token_of_row]

    def pair_weights(self, rows: int, choices: int, token_of_row: Tensor | None = None) -> Tensor:
        """``[rows * choices]`` int64: 1 where a (row, choice) pair is of a real token; else as :meth:`weights`."""
        if token_of_row is None and (rows, choices) in self._pairs:
            return self._pairs[rows, choices]
        real_R = self.weights(rows, token_of_row)
        if real_R is None:
            pairs = torch.ones(rows * choices, dtype=torch.int64, device=self.totals.device)
        else:
            pairs = real_R.to(torch.int64).repeat_interleave(choices)
        if token_of_row is None:
            self._pairs[rows, choices] = pairs
        return pairs

    def _saw_model(self, module: nn.Module, given: dict[str, Any]) -> None:
        self._outer_mask = given.get("attention_mask")

    def _left_model(self, *_: Any) -> None:
        self._outer_mask = None

    def _saw_layers(self, module: nn.Module, given: dict[str, Any]) -> None:
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if tokens is None or not counts_now(module):
            return
        batch, length = tokens.shape[:2]
        mask_BS = self._mask(given, tokens)
        self._pairs = {}
        self.rows, self.real_T = _own_rows(module, mask_BS, batch, length, tokens.device)
        self.totals[0] += self.rows if self.real_T is None else self.real_T.sum()
        self._count_keys(module, _keys(mask_BS, given.get("position_ids"), batch, length, tokens.device))

    def _mask(self, given: dict[str, Any], tokens: Tensor) -> Tensor | None:
        """``[B, S]``, which of ``tokens [B, S, ...]`` are real; None: all."""
        masks = (given.get("attention_mask"), self._outer_mask)
        return next((mask for mask in masks if _is_mask(mask, *tokens.shape[:2])), None)

    def _count_keys(self, module: nn.Module, keys_BS: Tensor) -> None:
        ranks = _place(module)[0]  # that hold the same batch: attention is spread over them
        self.totals[1] += keys_BS.sum() // ranks
        if self.window is not None:
            self.totals[2] += keys_BS.clamp(max=self.window).sum() // ranks


def _with_names(module: nn.Module, see: Callable[[nn.Module, dict[str, Any]], None]) -> Callable[..., None]:
    """A forward pre-hook that shows ``see`` all arguments by name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(module, {**kwargs, **dict(zip(names, args, strict=False))})

    return hook


def _is_mask(mask: Any, batch: int, length: int) -> bool:
    return isinstance(mask, Tensor) and mask.shape == (batch, length)


def _place(module: nn.Module) -> tuple[int, int, int]:
    """``(ranks, rank, least slice)`` of context parallelism round a base model."""
    forward: Any = module.forward
    return (*forward.place, forward.least_slice) if isinstance(forward, CutForward) else (1, 0, 1)


def _own_rows(
    module: nn.Module, mask_BS: Tensor | None, batch: int, length: int, device: torch.device
) -> tuple[int, Tensor | None]:
    """``(T, [T] bool or None)`` of this rank."""
    size, rank, least = _place(module)
    whole = padded_length(length, size, least)
    part = whole // size
    if mask_BS is None:
        if whole == length:
            return batch * part, None
        mask_BS = torch.ones(batch, length, dtype=torch.bool, device=device)
    real_BS = F.pad(mask_BS.to(torch.bool), (0, whole - length))
    return batch * part, real_BS.narrow(1, rank * part, part).reshape(-1)


def _keys(mask_BS: Tensor | None, position_ids: Any, batch: int, length: int, device: torch.device) -> Tensor:
    """``[B, S]`` int64, keys that each token attends to: its place in its document, from 1; 0 at padding."""
    if isinstance(position_ids, Tensor) and position_ids.ndim == 2:
        place_BS = position_ids.to(torch.int64).expand(batch, -1) + 1
    elif mask_BS is None:
        return torch.arange(1, length + 1, device=device).expand(batch, -1)
    else:
        place_BS = mask_BS.to(torch.int64).cumsum(1)
    return place_BS if mask_BS is None else place_BS * mask_BS.to(torch.int64)
