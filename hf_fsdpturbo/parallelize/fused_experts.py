"""Our expert block where nothing is sharded: in one process, under our trainers, other trainers and in generation.

T tokens, K top-k, D hidden. Parameters stay what they are: optimizers, checkpoints and ``save_pretrained`` see no
difference. Experts that are not plain SwiGLU keep their own forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_fsdpturbo.dispatch.dispatcher import get_dispatcher
from hf_fsdpturbo.ops.table import OPS, get_ops
from hf_fsdpturbo.ops.weight_copies import WeightCopies
from hf_fsdpturbo.sharding.expert_parallel import is_plain_swiglu
from hf_fsdpturbo.sharding.packed_experts import has_packed_experts

IMPLEMENTATION = "fsdpturbo"  # the name in Transformers' registry of experts implementations
COMPUTE_DTYPES = (torch.bfloat16, torch.float32)


@dataclass
class WholeExperts:
    """All experts of a module during one call, as ``dispatch.LocalExperts``.

    Attributes:
        module: the experts module.
        forward: its own forward.
        shown: ``(gate_up [E, 2F, D], down [E, D, F])`` as the module shows them now: its parameters, or PEFT's
            ``W + s B A``, which stands in their place for the length of a call.
        dtype: to compute in.
        copies: where weights in that dtype are kept.
    """

    module: nn.Module
    forward: Callable[..., Tensor]
    shown: tuple[Tensor, Tensor]
    dtype: torch.dtype
    copies: WeightCopies
    num_local_experts: int
    is_plain_swiglu: bool = True

    @property
    def compute_dtype(self) -> torch.dtype:
        """``dtype``."""
        return self.dtype

    def weights(self) -> tuple[Tensor, Tensor]:
        """``(gate_up, down)`` in ``dtype``."""
        mode = self.module.training
        gate_up, down = self.shown
        return (
            self.copies.get("gate_up_proj", gate_up, self.dtype, mode),
            self.copies.get("down_proj", down, self.dtype, mode),
        )

    def forward_rows(self, rows_SD: Tensor, local_expert_S: Tensor, weight_S: Tensor | None) -> Tensor:
        """The module's own forward on rows that each go to one expert; ``[S, D]``."""
        weight_S = torch.ones_like(local_expert_S, dtype=rows_SD.dtype) if weight_S is None else weight_S
        return self.forward(rows_SD, local_expert_S.unsqueeze(-1), weight_S.unsqueeze(-1))


class FusedForward:
    """Callable in place of ``experts.forward`` in one process.

    It computes in autocast's dtype, as a linear layer would, or without autocast in that of the weights. What grouped
    matmuls do not take (float16, float64, odd sizes) and what ``torch.compile`` traces runs the module's own forward.

    Args:
        module: plain SwiGLU experts (``is_plain_swiglu``).
        forward: the module's own.
        dispatcher: "fused", or "auto" to time it against the own forward.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], dispatcher: str = "fused") -> None:
        self.module, self.forward = module, forward
        self.make_dispatcher = functools.partial(get_dispatcher(dispatcher), None)
        self.dispatcher = self.make_dispatcher(len(cast(Tensor, module.gate_up_proj)))
        self.copies = WeightCopies()
        self._fitting: dict[tuple[str, torch.dtype], bool] = {}

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``hidden_states [..., D], top_k_index [T, K], top_k_weights [T, K]`` -> shape and dtype of the first."""
        kind, module = hidden_states.device.type, self.module
        shown = cast(Tensor, module.gate_up_proj), cast(Tensor, module.down_proj)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else shown[0].dtype
        if torch.compiler.is_compiling() or not self._fits(kind, dtype, shown):
            return self.forward(hidden_states, top_k_index, top_k_weights)
        rows_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        index_TK, weights_TK = (each.reshape(rows_TD.shape[0], -1) for each in (top_k_index, top_k_weights))
        experts = WholeExperts(module, self.forward, shown, dtype, self.copies, len(shown[0]))
        if self.dispatcher.num_experts != len(shown[0]):  # spread over ranks after us, shown its own block alone
            self.dispatcher = self.make_dispatcher(len(shown[0]))
        with torch.autocast(kind, enabled=False):
            output_TD = self.dispatcher(rows_TD.to(dtype), index_TK, weights_TK, experts)
        return output_TD.view(hidden_states.shape).to(hidden_states.dtype)

    def _fits(self, kind: str, dtype: torch.dtype, shown: tuple[Tensor, Tensor]) -> bool:
        if getattr(self.module, "_is_expert_parallel", False):
            return False  # Transformers' own expert parallelism marks other ranks' pairs with an index past the last
        if (kind, dtype) not in self._fitting:
            shapes = (torch.empty(weight.shape, dtype=dtype, device="meta") for weight in shown)
            known = kind in OPS and dtype in COMPUTE_DTYPES and all(w.is_floating_point() for w in shown)
            self._fitting[kind, dtype] = known and get_ops(kind).supports(*shapes)
        return self._fitting[kind, dtype]


@dataclass
class FusedExperts:
    """Which experts modules run through our block, and why others do not (by reason)."""

    names: list[str] = field(default_factory=list)
    kept: dict[str, list[str]] = field(default_factory=dict)

    def lines(self, dispatcher: str) -> list[str]:
        """For the summary: one line for those that do, one for each reason."""
        said = [f"{len(self.names)} expert modules in one process, dispatcher {dispatcher}"] if self.names else []
        kept = (f"{len(names)} expert modules keep their own forward: {why}" for why, names in self.kept.items())
        return [*said, *kept]


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose experts Transformers' interface of implementations serves, by name."""
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
    return {
        name: module
        for name, module in model.named_modules()
        if all(isinstance(getattr(module, flag, None), bool) for flag in flags)
    }


def why_kept(module: nn.Module) -> str | None:
    """Why a module keeps its own forward, None where our block computes the same."""
    if not is_plain_swiglu(module):
        return "they are not a plain gated SwiGLU"
    if getattr(module, "_hf_hook", None) is not None:
        return "accelerate moves their weights between devices (device_map)"
    return None


def dispatcher_alone(args: Any) -> tuple[str, str | None]:
    """The dispatcher of a run of one process and a note, from the arguments; "eager" is the experts' own forward."""
    asked = args.fsdpturbo_params.ep_dispatcher
    if asked == "eager" or getattr(args, "torch_compile", False):
        why = "torch_compile: the experts run Transformers' own forward, which it can compile"
        return "eager", None if asked == "eager" else why
    if asked in ("mc2", "domino"):
        return "fused", f"ep_dispatcher={asked} has nothing to exchange in one process: fused runs"
    return asked, None


def route_in_one_process(model: nn.Module, dispatcher: str = "fused") -> FusedExperts:
    """Put our block into every experts module that it computes exactly; a second call changes nothing.

    Args:
        model: whole, on any device; it may be wrapped by PEFT, before or after.
        dispatcher: "fused" or "auto"; "eager" leaves the model as it is.
    """
    found = FusedExperts()
    if dispatcher == "eager":
        return found
    for name, module in experts_modules(model).items():
        if has_packed_experts(module):
            continue  # quantise.py has put ours in already
        if isinstance(module.forward, FusedForward):
            found.names.append(name)
        elif (why := why_kept(module)) is not None:
            found.kept.setdefault(why, []).append(name)
        else:
            module.forward = FusedForward(module, module.forward, dispatcher)  # type: ignore[method-assign]
            found.names.append(name)
    return found


def register_experts_implementation() -> None:
    """Make ``experts_implementation="fsdpturbo"`` known to Transformers; a second call changes nothing."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What ``experts_implementation="fsdpturbo"`` calls; other experts run Transformers' ``grouped_mm``."""
    block = vars(module).get("fsdpturbo_block")
    if block is None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        own = functools.partial(ALL_EXPERTS_FUNCTIONS["grouped_mm"], module)
        block = own if why_kept(module) is not None else FusedForward(module, own)
        module.fsdpturbo_block = block
    result: Tensor = block(hidden_states, top_k_index, top_k_weights)
    return result


def enable_fused_experts(model: nn.Module | None = None) -> FusedExperts:
    """Our expert block without our trainers: plain ``Trainer``, TRL, generation, in one process or under DDP.

    Also makes ``from_pretrained(..., experts_implementation="fsdpturbo")`` known; without ``model``, only that.

    Args:
        model: a Transformers model, its parameters whole. Call it before the trainer is built; PEFT may come before
            or after.

    Returns:
        names of the experts modules that run our block now, and of those that keep their own, by reason.
    """
    register_experts_implementation()
    found = FusedExperts() if model is None else route_in_one_process(model)
    for line in found.lines("fused"):
        print(f"[hf_fsdpturbo] {line}", flush=True)
    return found
