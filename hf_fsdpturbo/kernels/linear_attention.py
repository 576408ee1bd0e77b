"""Which gated delta rule a model runs: FLA or ours, decided by the tensors' device at every call, reported once.

Shape legend: see gated_delta_rule.py.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_fsdpturbo.arguments import FLA_OPERATOR_NAMES, KernelParams
from hf_fsdpturbo.kernels import fla
from hf_fsdpturbo.kernels.causal_conv import causal_conv1d
from hf_fsdpturbo.kernels.fla_trial import WORTH_SAYING, TrialSizes, trial
from hf_fsdpturbo.kernels.gated_delta_rule import chunk_gated_delta_rule
from hf_fsdpturbo.kernels.rebinding import CONV, RECURRENT, RULE, linear_attention_layers, rebind, scope_of
from hf_fsdpturbo.packing.documents import Documents, attach_documents
from hf_fsdpturbo.ranks import everyone, from_node_leader, node, rank

logger = logging.getLogger(__name__)

DEFAULT_CHUNK_SIZE = 64
COST = "Steps about 2.5 times slower than with FLA's kernels have been reported (trl issue 5713)"
TUNING = (
    "Trying flash-linear-attention on this run's sizes (%s). Kernels that this machine has not seen are tuned and "
    "compiled first, which can take minutes; the result is kept in Triton's cache (TRITON_CACHE_DIR, ~/.triton)."
)
CHUNK_OPERATOR, RECURRENT_OPERATOR = FLA_OPERATOR_NAMES


@dataclass(frozen=True)
class Choice:
    """What a run's linear attention does; two models of one process must agree on it.

    Attributes:
        operators: FLA operators that may run; empty means ours everywhere.
        device_types: where FLA may run; empty means nowhere.
        chunk_size: of whichever rule runs.
    """

    operators: frozenset[str]
    device_types: frozenset[str]
    chunk_size: int

    def uses_fla(self, operator: str, tensor: torch.Tensor) -> bool:
        """FLA's kernels are for its devices and for up to 32-bit floats; everything else is ours."""
        return (
            operator in self.operators
            and tensor.device.type in self.device_types
            and tensor.dtype != torch.float64
        )


def make_rule(choice: Choice) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The function that replaces Transformers' ``torch_chunk_gated_delta_rule``; the same call, plus ``documents``."""

    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        documents: Documents | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # A state that continues each row's first document only (a packed prompt behind a cache) is ours to do.
        if choice.uses_fla(CHUNK_OPERATOR, query) and (initial_state is None or documents is None):
            return fla.chunk_rule(
                query, key, value, g=g, beta=beta, chunk_size=choice.chunk_size, initial_state=initial_state,
                output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                cu_seqlens=cu_seqlens, documents=documents,
            )  # fmt: skip
        kwargs.pop("chunk_size", None)
        if documents is not None:
            kwargs.update(document_ids=documents.ids)
        return chunk_gated_delta_rule(
            query, key, value, g=g, beta=beta, chunk_size=choice.chunk_size, initial_state=initial_state,
            output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens, **kwargs,
        )  # fmt: skip

    return rule


def make_recurrent_rule(choice: Choice) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The function that replaces ``torch_recurrent_gated_delta_rule`` (one token of a generation, with a state)."""

    def rule(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if choice.uses_fla(RECURRENT_OPERATOR, query):
            return fla.recurrent_rule(query, key, value, **kwargs)
        return chunk_gated_delta_rule(query, key, value, chunk_size=1, **kwargs)

    return rule


def make_conv(choice: Choice) -> Callable[..., torch.Tensor]:
    """The function that replaces ``causal_conv1d_fn``; FLA's convolution runs where FLA's chunk rule does."""

    def conv(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        documents: Documents | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        whole = documents is None or documents.ids.shape[1] == hidden_states.shape[-1]  # not behind a cache
        if choice.uses_fla(CHUNK_OPERATOR, hidden_states) and activation in (None, "silu", "swish") and whole:
            cu_seqlens = kwargs.get("cu_seq_lens_q") if hidden_states.shape[0] == 1 else None
            return fla.conv(hidden_states, weight, bias, activation, cu_seqlens=cu_seqlens, documents=documents)
        if documents is not None:
            kwargs.update(document_ids=documents.ids)
        return causal_conv1d(hidden_states, weight, bias, activation, **kwargs)

    return conv


def choose(
    model: nn.Module, params: KernelParams | None, device_type: str, cp_size: int = 1, length: int | None = None
) -> tuple[Choice, list[str], list[str]]:
    """Decide for a model with linear attention.

    kernel_config None keeps Transformers' own default (FLA where it can run); a kernel_config says exactly what runs,
    so FLA then runs only if ``name`` lists it. FLA is put to a trial on the device before it is chosen. In a process
    group every rank must call this: if FLA fails on one, all use PyTorch (else the ranks would run different rules).

    Returns:
        The choice, lines to report, and warnings.
    """
    named = params is not None and "flash-linear-attention" in params.name
    chunk_size = params.chunk_size if params is not None and named else DEFAULT_CHUNK_SIZE
    ours = Choice(frozenset(), frozenset(), chunk_size)
    wanted = frozenset((params.include_kernels if params is not None and named else None) or FLA_OPERATOR_NAMES)
    layers = sum(1 for _ in linear_attention_layers(model))
    described = f"{layers} linear-attention layers: PyTorch gated delta rule, chunk size {chunk_size}"
    if params is not None and not named:
        reason = "kernel_config name does not list flash-linear-attention"
    else:
        sizes = trial_sizes(model, chunk_size, cp_size, length)
        reason = _agreed(device_type, fla.why_not(device_type), sizes) or ""
    if not reason:
        left_out = "" if CHUNK_OPERATOR in wanted else f"; {CHUNK_OPERATOR} is not included and stays PyTorch"
        names = ", ".join(sorted(wanted))
        line = f"{layers} linear-attention layers: flash-linear-attention ({names}), chunk size {chunk_size}{left_out}"
        return Choice(wanted, frozenset((device_type,)), chunk_size), [line], []
    if device_type == "cpu" and not named:
        return ours, [f"{described} ({reason})"], []
    cost = "" if device_type == "cpu" else f" {COST}."
    return ours, [], [f"{described} on {device_type}, because {reason}.{cost}"]


def _agreed(device_type: str, why_not: str | None, sizes: TrialSizes) -> str | None:
    """Why FLA does not run, the same text on every rank; None where it runs on all of them."""
    if device_type == "cpu" and why_not is not None:
        return why_not  # no rank has kernels: nothing to ask the others
    reasons = everyone(_in_turn(device_type, why_not, sizes))
    failed = [index for index, text in enumerate(reasons) if text is not None]
    if not failed:
        return None
    where = "" if len(failed) == len(reasons) else f"on rank {', '.join(map(str, failed))} of {len(reasons)}, "
    return f"{where}{reasons[failed[0]]}"


def _in_turn(device_type: str, why_not: str | None, sizes: TrialSizes) -> str | None:
    """This rank's trial. The first rank of a machine goes first: the others find what it tuned and compiled."""
    first = node()[1][0] == rank()
    if rank() == 0 and why_not is None and device_type != "cpu":
        logger.warning(TUNING, sizes)
    try:
        reason = why_not or (_tried(device_type, sizes) if first else None)
    finally:
        from_node_leader(None)
    return reason or (None if first else _tried(device_type, sizes))


def _tried(device_type: str, sizes: TrialSizes) -> str | None:
    problem, seconds = trial(torch.device(device_type), sizes)
    if rank() == 0 and seconds > WORTH_SAYING:
        logger.warning("flash-linear-attention's trial took %.0f s.", seconds)
    return problem


def trial_sizes(model: nn.Module, chunk_size: int, cp_size: int, length: int | None) -> TrialSizes:
    """What one rank's kernels will be asked; a model that does not tell a size is tried at the usual one."""
    _, layer = next(linear_attention_layers(model))
    usual = TrialSizes()
    return TrialSizes(
        key_heads=max(1, getattr(layer, "num_k_heads", usual.key_heads) // cp_size),
        value_heads=max(1, getattr(layer, "num_v_heads", usual.value_heads) // cp_size),
        key_dim=getattr(layer, "head_k_dim", usual.key_dim),
        value_dim=getattr(layer, "head_v_dim", usual.value_dim),
        conv_width=getattr(layer, "conv_kernel_size", usual.conv_width),
        chunk_size=chunk_size,
        length=length or usual.length,
    )


def base_models(model: nn.Module) -> list[nn.Module]:
    """The innermost modules that own decoder layers with linear attention: they see ``position_ids`` first-hand."""
    modules = dict(model.named_modules())
    owners: dict[int, nn.Module] = {}
    for fqn, _ in linear_attention_layers(model):
        parts = fqn.split(".")
        for end in range(len(parts) - 1, -1, -1):
            parent = modules[".".join(parts[:end])]
            if any("position_ids" in name for name in _forward_arguments(parent)) and hasattr(parent, "layers"):
                owners[id(parent)] = parent
                break
    return list(owners.values())


def _forward_arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)


def apply_linear_attention(model: nn.Module, choice: Choice) -> list[Callable[[], None]]:
    """Bind the chosen functions and mark documents.

    Returns:
        The undos.

    Raises:
        ValueError: the modeling file has no convolution of the known name, or see :func:`rebind`.
    """
    _, layer = next(linear_attention_layers(model))
    scope = scope_of(layer, RULE) or {}
    recurrent = make_recurrent_rule(choice) if RECURRENT in scope else None
    if CONV not in scope:
        raise ValueError(
            f"{type(layer).__name__} calls {RULE} but its file has no {CONV}: packed documents cannot be kept apart "
            "in its convolution. This Transformers release is not supported for this model."
        )
    undo = rebind(
        model, rule=make_rule(choice), conv=make_conv(choice), recurrent=recurrent, layer="kernels", key=choice
    )
    return [undo, *(attach_documents(base) for base in base_models(model))]
