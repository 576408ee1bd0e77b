"""Where the sequence is cut and put together: round the forward of the module that owns the decoder layers.

B batch, S sequence as given, P ranks of the cp group, s positions a rank gets (S padded to a multiple of P, over P),
D hidden, E experts.

    every cp rank:  [B, S] ids, positions, mask
       -> slice        [B, s]            plan of the whole sequence handed to the layers
       -> the layers   [B, s, D]         attention exchanges heads and sequence
       -> gather       [B, S, D]         last hidden state, router logits [B * S, E], hidden states if asked for

Losses and heads above see whole tensors and run unchanged, once on every cp rank. An activation-checkpoint replay
happens inside, layer by layer, and repeats the exchanges as they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hf_fsdpturbo.context_parallel.collectives import gather_plain, gather_sequence
from hf_fsdpturbo.packing.sequence_plan import KEYWORD, SequencePlan, make_plan

KEEP_CUT = "keep_last_hidden_state_cut"  # keyword of a caller that goes on with this rank's slice (sharded_head.py)

_PER_TOKEN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "moe_mm_token_type_ids")

# Keywords that describe documents of the whole sequence: they end here and live on in the plan.
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "documents")


class CutForward:
    """Callable in place of a base model's ``forward``.

    Args:
        module: the base model.
        forward: the forward it had.
        group: the cp group.
        least_slice: positions every rank must get (see ``make_plan``).
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], group: ProcessGroup, least_slice: int) -> None:
        self.module = module
        self.forward = forward
        self.group = group
        self.least_slice = least_slice
        self.signature = inspect.signature(type(module).forward)
        self.agreed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward's arguments for the whole sequence in, outputs for the whole sequence out.

        Raises:
            ValueError: a cache (generation), a prepared mask, attention weights, or ranks with different batches.
        """
        given = self._by_name(args, kwargs)
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if tokens is None:
            return self.forward(**given)  # its own error
        self._refuse(given)
        batch, length = tokens.shape[:2]
        if not self.agreed:
            check_same_batch(tokens, self.group)
            self.agreed = True
        lengths = {name: given.pop(name, None) for name in _LENGTHS}
        keep_cut = given.pop(KEEP_CUT, False)
        position_ids = given.get("position_ids")
        if position_ids is None:
            position_ids = torch.arange(length, device=tokens.device).unsqueeze(0).expand(batch, -1)
        plan = make_plan(
            self.group,
            batch,
            length,
            tokens.device,
            least_slice=self.least_slice,
            attention_mask=given.get("attention_mask"),
            position_ids=given.get("position_ids"),
            cu_seq_lens_q=lengths["cu_seq_lens_q"],
            seq_idx=lengths["seq_idx"],
        )
        for name, whole in (*given.items(), ("position_ids", position_ids)):
            if name in _PER_TOKEN and whole is not None:
                given[name] = cut(whole, plan, length, dim=-1 if name == "position_ids" else 1)
        cut_deepstack(given, plan)
        outputs = self.forward(**{**given, "use_cache": False, "documents": None, KEYWORD: plan})
        return join_outputs(outputs, plan, length, keep_cut=keep_cut)

    @property
    def place(self) -> tuple[int, int]:
        """Size of the cp group and this rank's place in it."""
        return torch.distributed.get_world_size(self.group), torch.distributed.get_rank(self.group)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self.signature.bind_partial(self.module, *args, **kwargs).arguments
        named = dict(list(bound.items())[1:])
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update(named.pop(name, {}))
        return named

    def _refuse(self, given: dict[str, Any]) -> None:
        size = torch.distributed.get_world_size(self.group)
        if any(given.get(name) is not None for name in ("cache", "past_key_values")):
            raise ValueError(
                f"A cache was passed with cp_size={size}: generation is not supported under context parallelism. "
                "Generate with cp_size=1."
            )
        mask = given.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            raise ValueError(
                f"attention_mask must be 2-D (batch, sequence) or None with cp_size={size}, but it is "
                f"{tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}. Pass the padding mask."
            )
        if given.get("output_attentions"):
            raise ValueError(
                f"output_attentions=True with cp_size={size}: attention weights are spread over ranks. Leave it out."
            )


def check_same_batch(tokens: Tensor, group: ProcessGroup) -> None:
    """Ranks of one cp group must hold the same batch; compared at the first forward.

    Raises:
        ValueError: on every rank of the group.
    """
    content = tokens.detach().float() if tokens.is_floating_point() else tokens.detach().long()
    marks = torch.stack([content.new_tensor(tokens.shape[0]), content.new_tensor(tokens.shape[1]), content.sum()])
    everybody = gather_plain(marks[None, None], group)[0]
    if not bool(((everybody - everybody[:1]).abs() <= everybody[:1].abs() * 1e-6).all()):
        raise ValueError(
            f"cp_size={len(everybody)}: ranks of one context-parallel group got different batches (rows, length, sum "
            f"of ids): {everybody.tolist()}. "
            "Let the trainer make the data loader, and keep the collator free of randomness."
        )


def cut(whole: Tensor, plan: SequencePlan, length: int, dim: int) -> Tensor:
    """This rank's positions of a tensor with ``length`` positions along ``dim``; positions past its end are zero."""
    dim = dim % whole.ndim
    missing = plan.length - length
    if missing:
        whole = F.pad(whole, (0, 0) * (whole.ndim - 1 - dim) + (0, missing))
    return whole.narrow(dim, plan.local.start, plan.local.stop - plan.local.start)


def cut_deepstack(given: dict[str, Any], plan: SequencePlan) -> None:
    """What image tokens add after early layers (Qwen3-VL): the rows ``[N, D]`` of this rank's slice, in place.

    ``visual_pos_masks [B, S]`` says which tokens these N are, row by row.
    """
    mask_BS = given.get("visual_pos_masks")
    if mask_BS is None:
        return
    places = torch.arange(mask_BS.shape[1], device=mask_BS.device)
    mine_S = (places >= plan.local.start) & (places < plan.local.stop)
    mine_N = mine_S.expand_as(mask_BS)[mask_BS]
    given["deepstack_visual_embeds"] = [rows_ND[mine_N] for rows_ND in given["deepstack_visual_embeds"]]
    given["visual_pos_masks"] = cut(mask_BS, plan, mask_BS.shape[1], dim=1)


def join_outputs(outputs: Any, plan: SequencePlan, length: int, keep_cut: bool = False) -> Any:
    """Whole-sequence tensors in a base model's output: ``last_hidden_state``, ``router_logits``, ``hidden_states``."""
    if not keep_cut:
        outputs["last_hidden_state"] = gather_sequence(outputs["last_hidden_state"], plan.cp_group)[:, :length]
    for name in ("router_logits", "hidden_states"):
        if outputs.get(name) is not None:
            outputs[name] = _join_layers(outputs[name], plan, length)
    return outputs


def _join_layers(layers: tuple[Tensor, ...], plan: SequencePlan, length: int) -> tuple[Tensor, ...]:
    """One collective for the tensors of all layers, ``[B, s, X]`` or ``[B * s, X]`` each; shape kept, s becomes S."""
    rows = [x.reshape(plan.batch, plan.length // plan.size, -1) for x in layers]
    whole = gather_sequence(torch.cat(rows, dim=-1), plan.cp_group)[:, :length]
    parts = whole.split([x.shape[-1] for x in rows], dim=-1)
    return tuple(
        part.reshape(plan.batch * length, -1) if x.ndim == 2 else part for part, x in zip(parts, layers, strict=True)
    )


def install_boundary(module: nn.Module, group: ProcessGroup, least_slice: int) -> None:
    """Put :class:`CutForward` round a base model's forward."""
    module.forward = CutForward(module, module.forward, group, least_slice)  # type: ignore[assignment]
