"""The router's aux loss of all layers as one autograd node, a kernel a layer, in place of Transformers' on CUDA.

Transformers' ``load_balancing_loss_func`` runs some ten small kernels a layer, forward and backward again; its
backward comes first after the trainer has waited for its metrics, so the device idles while the host launches them
(of an 8-layer step of 220 ms on an H200: 2.4 ms of kernels and 2.2 of idleness). The formula is Switch Transformer's,
equations 4 to 6 (Fedus, Zoph, Shazeer):

    loss = E sum_e (c_e / rows) (p_e / rows),    c_e = sum_t m_t [e chosen by t],    p_e = sum_t m_t softmax(l_t)_e

Modeling files have their own copies of the function, TRL takes Mixtral's for all. A file's is replaced where both
agree on random logits, loss and gradients, with and without a mask; otherwise, and for arguments that ours does not
know, theirs runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from hf_fsdpturbo.kernels.accelerator_set import Applied
from hf_fsdpturbo.kernels.rebinding import Undo, bind, scope_of
from hf_fsdpturbo.ops.relative_distance import relative_distance
from hf_fsdpturbo.ops.table import OpSet, get_ops

NAME = "load_balancing_loss_func"
_TRLS = "transformers.models.mixtral.modeling_mixtral"  # whose function TRL's fused LM head imports
TOLERANCE = 1e-5  # relative, float32 logits; sums in another order give 1e-7

Function = Callable[..., Any]


class _AuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, top_k: int, mask_T: Tensor | None, ops: OpSet, *logits: Tensor) -> Tensor:
        first = logits[0]
        tokens, experts = first.shape
        dtype = torch.softmax(first[:0], -1).dtype  # on CUDA float32 under autocast
        probs_NE = torch.empty(len(logits) * tokens, experts, dtype=dtype, device=first.device)
        parts = probs_NE.split(tokens)
        loads = [ops.router_load(each, top_k, mask_T, part) for each, part in zip(logits, parts, strict=True)]
        chosen_E, probable_E = torch.stack(loads).sum(0)
        rows = len(logits) * (tokens if mask_T is None else mask_T.sum())
        chosen_E = chosen_E / rows
        ctx.save_for_backward(probs_NE, chosen_E * (experts / rows), *(() if mask_T is None else (mask_T,)))
        ctx.ops, ctx.tokens, ctx.dtype = ops, tokens, first.dtype
        return (chosen_E * (probable_E / rows)).sum() * experts

    @staticmethod
    @once_differentiable  # type: ignore[no-untyped-call, untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probs_NE, slope_E, *mask = ctx.saved_tensors
        out_NE = torch.empty_like(probs_NE, dtype=ctx.dtype)
        ctx.ops.router_load_backward(probs_NE, slope_E * gradients[0], mask[0] if mask else None, out_NE)
        return None, None, None, *out_NE.split(ctx.tokens)


def _is_ours(gate_logits: Any, num_experts: Any, attention_mask: Any) -> bool:
    """Whether these are what models hand over: logits ``[T, E]`` of all layers, and a mask ``[B, S]`` or none."""
    if not (isinstance(gate_logits, tuple) and gate_logits and all(type(each) is Tensor for each in gate_logits)):
        return False
    first = gate_logits[0]
    alike = all((x.shape, x.dtype, x.device) == (first.shape, first.dtype, first.device) for x in gate_logits)
    masked = attention_mask is None or type(attention_mask) is Tensor and attention_mask.numel() == len(first)
    is_plain = first.dtype in (torch.float32, torch.bfloat16, torch.float16) and first.ndim == 2 and len(first) > 0
    return alike and masked and is_plain and first.shape[1] == num_experts and first.stride(1) == 1


def one_pass(theirs: Function, device_type: str) -> Function:
    """``load_balancing_loss_func`` of a modeling file, with ours for logits on ``device_type``."""
    ops = get_ops(device_type)

    def load_balancing_loss_func(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Any = None
    ) -> Any:
        here = _is_ours(gate_logits, num_experts, attention_mask) and gate_logits[0].device.type == device_type
        if not here or torch.compiler.is_compiling():  # which fuses theirs by itself
            return theirs(gate_logits, num_experts, top_k, attention_mask)
        mask_T = None
        if attention_mask is not None:
            mask_T = attention_mask.reshape(-1).to(device=gate_logits[0].device, dtype=torch.float32).contiguous()
        return _AuxLoss.apply(top_k, mask_T, ops, *gate_logits)

    return load_balancing_loss_func


def distance(ours: Function, theirs: Function, device: torch.device | str) -> float:
    """The largest relative distance of loss and gradients on random float32 logits, with and without a mask."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(60, 12, generator=generator).to(device) for _ in range(3)]
    mask = (torch.arange(60).reshape(4, 15) % 15 < torch.tensor([15, 9, 1, 15])[:, None]).long().to(device)
    worst = 0.0
    for given in (None, mask):
        found = []
        for function in (ours, theirs):
            leaves = [each.clone().requires_grad_() for each in logits]
            loss = function(tuple(leaves), 12, 3, given)
            found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        worst = max(worst, *(relative_distance(a, b) for a, b in zip(*found, strict=True)))
    return worst


def apply_aux_loss(model: nn.Module, device_type: str) -> Applied:
    """Replace the function in the modeling files that ``model`` calls it from, and where TRL takes it, on CUDA."""
    done = Applied()
    if device_type != "cuda":
        return done
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    scopes = {id(s): s for module in models if (s := scope_of(module, NAME)) is not None}
    if not scopes:
        return done
    trls = vars(importlib.import_module(_TRLS))
    scopes[id(trls)] = trls
    for scope in scopes.values():
        undo, line = _replace(model, scope, device_type)
        done.undos += [] if undo is None else [undo]
        done.lines.append(line)
    return done


def _replace(model: nn.Module, scope: dict[str, Any], device_type: str) -> tuple[Undo | None, str]:
    theirs, where = scope[NAME], f"aux loss of {scope['__name__'].rpartition('.')[2]}"
    if getattr(theirs, "__module__", None) != __name__:  # else ours, of another model in this process
        try:
            off = distance(one_pass(theirs, device_type), theirs, device_type)
        except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
            return None, f"{where}: its own, since the trial of ours failed ({type(error).__name__}: {error})"
        if not off < TOLERANCE:
            return None, f"{where}: its own, since ours is off by {off:.1e}"
    undo = bind(model, "aux_loss", device_type, scope, {NAME: one_pass(theirs, device_type)})
    return undo, f"{where}: one pass over all layers"
