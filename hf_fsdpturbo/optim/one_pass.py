"""``AdamW`` that clips, decays, updates and converts in one pass, and when it takes the place of torch's.

Note [A factor is used once]. Whoever has the gradients' norm sets ``gradient_factor``; the next ``step`` multiplies
gradients by it while it reads them, and forgets it. Gradients in memory stay unscaled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from hf_fsdpturbo.compat import is_available
from hf_fsdpturbo.ops import weight_copies
from hf_fsdpturbo.ops.adamw import AdamWNumbers, AdamWTensors
from hf_fsdpturbo.ops.table import OPS, get_ops
from hf_fsdpturbo.ranks import rank
from hf_fsdpturbo.shards import local_tensor

# Options of torch's AdamW that change what it computes: they stay with torch's own step.
_TORCHS_OWN = ("amsgrad", "maximize", "capturable", "differentiable")


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with its step in one kernel; the same groups, state names and checkpoints.

    Steps are counted on the host, as torch's own does it without ``fused`` and ``capturable``. Weights and moments may
    be of any float dtypes, plain or DTensors, with empty shards too.

    Attributes:
        gradient_factor: float32 scalar for the next step: see Note [A factor is used once].
    """

    gradient_factor: Tensor | None = None
    writes_weight_copies = True  # read by ops/weight_copies.py

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=False, foreach=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` returns.

        Raises:
            ValueError: a group has an option that only torch's own AdamW computes, or a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, self.gradient_factor = self.gradient_factor, None
        copies = weight_copies.current_copies()
        launches: dict[tuple[torch.device, AdamWNumbers], list[AdamWTensors]] = defaultdict(list)
        written = {}
        for group in self.param_groups:
            _check_group(group)
            known: dict[float, AdamWNumbers] = {}  # by step: most parameters have taken as many
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                step, tensors = self._advance(parameter, copies.get(parameter))
                if step not in known:
                    known[step] = _numbers(group, step)
                if tensors.copy is not None:
                    written[parameter] = tensors.copy
                if tensors.parameter.numel():
                    launches[tensors.parameter.device, known[step]].append(tensors)
        for (device, numbers), members in launches.items():
            get_ops(device.type if device.type in OPS else "cpu").adamw_(members, numbers, factor)
        weight_copies.keep_written(written)
        return loss

    def _advance(self, parameter: Tensor, copy: Tensor | None) -> tuple[float, AdamWTensors]:
        """Count the step of a parameter, whose state is made at its first; the count, from 1."""
        state, gradient = self.state[parameter], cast(Tensor, parameter.grad)
        if gradient.is_sparse:
            raise ValueError("AdamW: a gradient is sparse, which it does not take. Use SparseAdam or dense gradients.")
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if state["step"].device.type != "cpu":  # loaded from torch's fused AdamW: once
            state["step"] = state["step"].cpu()
        step = state["step"].item() + 1
        state["step"].fill_(step)
        moments = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        return step, AdamWTensors(local_tensor(parameter), local_tensor(gradient), *moments, copy)


def _numbers(group: dict[str, Any], step: float) -> AdamWNumbers:
    beta1, beta2 = group["betas"]
    betas, rate = (float(beta1), float(beta2)), float(group["lr"])
    return AdamWNumbers.at(step, rate, betas, group["eps"], group["weight_decay"])


def _check_group(group: dict[str, Any]) -> None:
    for name in _TORCHS_OWN:
        if group.get(name):
            raise ValueError(f"AdamW: {name}={group[name]!r} is computed by torch.optim.AdamW alone. Use that.")


def why_not(optimizer: Any) -> str | None:
    """Why an optimizer keeps its own step; None where :class:`AdamW` computes the same."""
    if type(optimizer) is not torch.optim.AdamW:
        return f"the optimizer is {type(optimizer).__name__}, not torch's AdamW"
    for group in optimizer.param_groups:
        found = next((name for name in _TORCHS_OWN if group.get(name)), None)
        if found is not None:
            return f"{found} is torch's own"
        if isinstance(group["lr"], Tensor):
            return "its learning rate is a tensor"
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        return "a parameter is complex"
    return None


def in_one_pass(
    optimizer: torch.optim.Optimizer, implementation: str = "auto", is_given: bool = False
) -> torch.optim.Optimizer:
    """Our :class:`AdamW` over the groups of a torch AdamW that has not stepped yet, or the optimizer as it is.

    Args:
        optimizer: as the arguments made it.
        implementation: "auto": ours where all parameters are on one CUDA device; "fsdpturbo": ours; "torch": as it is.
        is_given: the user made it or chose its class; then it stays as it is.

    Raises:
        ValueError: "fsdpturbo" asks for what ours does not compute; names why.
    """
    reason = "the optimizer is not made from the arguments" if is_given else why_not(optimizer)
    if isinstance(optimizer, AdamW):
        return optimizer
    if implementation == "fsdpturbo" and reason is not None:
        raise ValueError(
            f"optim_implementation='fsdpturbo': {reason}. Set optim to adamw_torch or adamw_torch_fused and pass no "
            "optimizer, or leave optim_implementation out."
        )
    if implementation == "torch" or reason is not None:
        return optimizer
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    on_cuda = len(devices) == 1 and next(iter(devices)).type == "cuda"
    if implementation == "auto" and not (on_cuda and is_available("triton")):
        return optimizer
    runs = ("fused", "foreach")  # how torch's would run
    groups = [{key: value for key, value in group.items() if key not in runs} for group in optimizer.param_groups]
    options = {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
    if rank() == 0:
        print(f"[hf_fsdpturbo] AdamW clips, decays and updates in one pass (optim_implementation={implementation})")
    return AdamW(groups, **options)
