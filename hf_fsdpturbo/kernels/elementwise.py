"""Put fused RMSNorm, rotary embedding and SwiGLU into a model wherever its own code provably computes that formula.

Shape legend: B batch, H heads, S sequence, R rotary part of the head size, D normalised dim, F ffn.

Norms and MLPs are recognised by what they compute, not by name: the module's own forward runs once on a few numbers
on CPU and is compared with the formula. What does not match is left alone. Norms and MLPs change per module (the class
is swapped for a subclass, so hooks, ``isinstance`` and copies go on working); the rotary function is a global of the
modeling file and goes through rebinding.py. Experts are never touched: their path is the dispatcher's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_fsdpturbo.kernels.rebinding import ROTARY, Undo, bind, scope_of

NormKernel = Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]
RotaryKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
SwigluKernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PROBE = 8  # features of the probe


def _random(*shape: int) -> torch.Tensor:
    """Fixed numbers on CPU, whatever default device or dtype is in force (a model may be in the making on meta)."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def _matches(found: object, expected: torch.Tensor) -> bool:
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    return torch.allclose(found, expected, atol=1e-5)


def norm_kind(module: nn.Module) -> str | None:
    """What an RMSNorm multiplies by: "plain" (weight), "zero_centred" (1 + weight), None if it is no such norm."""
    parameters = dict(module.named_parameters())
    if "RMSNorm" not in type(module).__name__ or list(parameters) != ["weight"] or norm_eps(module) is None:
        return None
    if parameters["weight"].ndim != 1 or len(inspect.signature(type(module).forward).parameters) != 2:
        return None  # gated norms take a second input
    x, weight = _random(4, PROBE).split((3, 1))
    try:
        with torch.device("cpu"), torch.no_grad():
            twin: Any = type(module)
            twin = twin(PROBE, eps=1e-3).float()
            twin.weight.copy_(weight[0])
            found = twin(x)
    except TypeError:  # another constructor: another kind of module
        return None
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)
    if _matches(found, normalised * weight):
        return "plain"
    return "zero_centred" if _matches(found, normalised * (1 + weight)) else None


def norm_eps(module: nn.Module) -> float | None:
    """The epsilon of an RMSNorm module, under either of its two names in Transformers."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def is_swiglu(module: nn.Module) -> bool:
    """Whether the module computes ``down_proj(silu(gate_proj(x)) * up_proj(x))`` with three linear layers."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(part, nn.Linear) for part in parts):
        return False
    x, (gate, up, down) = _random(2, PROBE), _random(3, PROBE, PROBE).unbind()
    stand_in = SimpleNamespace(
        gate_proj=lambda y: y @ gate, up_proj=lambda y: y @ up, down_proj=lambda y: y @ down,
        act_fn=getattr(module, "act_fn", None),
    )  # fmt: skip
    try:
        found = inspect.unwrap(type(module).forward)(stand_in, x)
    except (AttributeError, TypeError):  # it uses something else of itself
        return False
    return _matches(found, (F.silu(x @ gate) * (x @ up)) @ down)


def _swap_class(module: nn.Module, forward: Callable[..., torch.Tensor]) -> Undo:
    before = type(module)
    members = {"forward": forward, "__module__": before.__module__}
    module.__class__ = type(f"Fused{before.__name__}", (before,), members)

    def undo() -> None:
        module.__class__ = before

    return undo


def fuse_norms(model: nn.Module, kernel: NormKernel, device_type: str) -> list[Undo]:
    """Give every recognised RMSNorm a forward through ``kernel(x, weight, eps, zero_centred)`` on ``device_type``."""
    kinds: dict[type, str | None] = {}
    undos = []
    for module in model.modules():
        before = type(module)
        if before not in kinds:
            kinds[before] = norm_kind(module)
        kind, eps = kinds[before], norm_eps(module)
        if kind is None or eps is None:
            continue
        undos.append(_swap_class(module, _norm_forward(before, kernel, eps, kind == "zero_centred", device_type)))
    return undos


def _norm_forward(
    before: type[nn.Module], kernel: NormKernel, eps: float, zero_centred: bool, device_type: str
) -> Callable[..., torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != device_type:
            out: torch.Tensor = before.forward(self, x)
            return out
        return kernel(x, self.weight, eps, zero_centred)

    return forward


def fuse_mlps(model: nn.Module, kernel: SwigluKernel, device_type: str) -> list[Undo]:
    """Give every recognised SwiGLU MLP (dense layers, shared experts) a forward through ``kernel(gate, up)``."""
    kinds: dict[type, bool] = {}
    undos = []
    for module in model.modules():
        before = type(module)
        if before not in kinds:
            kinds[before] = is_swiglu(module)
        if not kinds[before]:
            continue

        def forward(self: Any, x: torch.Tensor, before: type[nn.Module] = before) -> torch.Tensor:
            if x.device.type != device_type:
                out: torch.Tensor = before.forward(self, x)
                return out
            projected: torch.Tensor = self.down_proj(kernel(self.gate_proj(x), self.up_proj(x)))
            return projected

        undos.append(_swap_class(module, forward))
    return undos


def is_half_rotation(function: Callable[..., Any]) -> bool:
    """Whether an ``apply_rotary_pos_emb`` rotates halves over the first R features and passes the rest through."""
    q, k = _random(1, 2, 3, PROBE), _random(2, 1, 3, PROBE)[:1]
    angle = _random(1, 3, PROBE // 4).repeat(1, 1, 2)
    try:
        found = function(q, k, angle.cos(), angle.sin())
    except (TypeError, RuntimeError):  # other arguments, or no partial rotation: tried again with the full size
        angle = _random(1, 3, PROBE // 2).repeat(1, 1, 2)
        try:
            found = function(q, k, angle.cos(), angle.sin())
        except (TypeError, RuntimeError):
            return False
    expected = _rotate_leading(_torch_rotation, q, k, angle.cos(), angle.sin())
    return all(_matches(a, b) for a, b in zip(found, expected, strict=True))


def _torch_rotation(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

    return turn(q), turn(k)


def _rotate_leading(
    kernel: RotaryKernel, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    size = cos.shape[-1]
    if size == q.shape[-1]:
        return kernel(q, k, cos, sin)
    turned_q, turned_k = kernel(q[..., :size].contiguous(), k[..., :size].contiguous(), cos, sin)
    return torch.cat((turned_q, q[..., size:]), -1), torch.cat((turned_k, k[..., size:]), -1)


def fuse_rotary(model: nn.Module, kernel: RotaryKernel, device_type: str, key: Hashable) -> list[Undo]:
    """Rebind ``apply_rotary_pos_emb`` of the model's files to ``kernel(q, k, cos, sin)`` where that is the formula."""
    scopes = {id(scope): scope for module in model.modules() if (scope := scope_of(module, ROTARY)) is not None}
    undos = []
    for scope in scopes.values():
        original = scope[ROTARY]
        if not is_half_rotation(original):
            continue

        def rotary(
            q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1,
            original: Callable[..., Any] = original, **kwargs: Any,
        ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            if q.device.type != device_type or unsqueeze_dim != 1 or kwargs:
                plain_q, plain_k = original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, **kwargs)
                return plain_q, plain_k
            return _rotate_leading(kernel, q, k, cos, sin)

        undos.append(bind(model, "rotary", key, scope, {ROTARY: rotary}))
    return undos
