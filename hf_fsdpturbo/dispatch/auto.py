"""auto: time the usable dispatchers on the first training step's own tokens and keep the fastest, on all ranks alike.

The first MoE layer that runs with gradients decides for all layers alike: on its real rows, routing and weights it
runs forward and backward with every candidate, before anything of the step is kept. Rounds go through all candidates
in turn, so that a slow moment hits them alike; a candidate's time is its median, on the slowest rank of the world.

T tokens, K top-k, D hidden.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_fsdpturbo.dispatch.dispatcher import Dispatcher, LocalExperts, get_dispatcher
from hf_fsdpturbo.dispatch.recompute import no_tape
from hf_fsdpturbo.node_groups import NodeGroups

logger = logging.getLogger(__name__)

CANDIDATES = ("fused", "domino", "eager", "mc2")
ONE_STAGE = "fused, one stage"  # a candidate over nodes only; ranks_per_node = world size keeps it for good
ROUNDS, WARM_UP = 7, 2


@dataclass(frozen=True)
class Timing:
    """``milliseconds`` of forward and backward by dispatcher, and ``reasons`` why others could not run."""

    milliseconds: dict[str, float]
    reasons: dict[str, str]

    @property
    def fastest(self) -> str:
        """The name with the smallest time, the earlier candidate on a tie."""
        return min(self.milliseconds, key=lambda name: self.milliseconds[name])

    def table(self) -> str:
        """One line a candidate, the fastest marked."""
        wide = max(8, *map(len, (*self.milliseconds, *self.reasons)))
        lines = [
            f"  {name:{wide}s} {ms:9.3f} ms{'  <- kept' if name == self.fastest else ''}"
            for name, ms in sorted(self.milliseconds.items(), key=lambda item: item[1])
        ]
        return "\n".join([*lines, *(f"  {name:{wide}s} not usable: {why}" for name, why in self.reasons.items())])


def _leaves(output: Tensor) -> list[Tensor]:
    """Every parameter that a graph reaches, so that its gradient can be taken without being accumulated."""
    found, seen, stack = [], set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # only the nodes of leaves have it
        if variable is not None:
            found.append(variable)
        stack.extend(following for following, _ in node.next_functions)
    return found


def _run_once(step: Callable[[], Tensor], gradient: Tensor) -> float:
    """Milliseconds of one forward and backward; no gradient is left anywhere, no hook of the training graph runs."""
    on_device = gradient.device.type != "cpu"
    if on_device:
        torch.accelerator.synchronize()
    start = time.perf_counter()
    output = step()
    torch.autograd.grad(output, _leaves(output), gradient)
    if on_device:
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) * 1e3


def time_dispatchers(
    steps: Mapping[str, Callable[[], Tensor]], gradient: Tensor, reasons: Mapping[str, str] | None = None
) -> Timing:
    """Time steps, the same result on all ranks of the default process group (one process decides alone).

    Args:
        steps: by name, what returns the block's output ``[T, D]``; in order of preference on a tie.
        gradient: of that output.
        reasons: candidates that are not among ``steps``, and why.
    """
    samples: dict[str, list[float]] = {name: [] for name in steps}
    # Inside activation checkpointing the step's own tape and saved-tensor hooks must not see these graphs.
    with no_tape(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        for turn in range(WARM_UP + ROUNDS):
            for name, step in steps.items():
                milliseconds = _run_once(step, gradient)
                if turn >= WARM_UP:
                    samples[name].append(milliseconds)
    medians = torch.tensor([statistics.median(times) for times in samples.values()], device=gradient.device)
    if dist.is_initialized():
        dist.all_reduce(medians, dist.ReduceOp.MAX)
    return Timing(dict(zip(samples, medians.tolist(), strict=True)), dict(reasons or {}))


# What was decided, by (group, experts, hidden, top-k, dtype, shapes of plain experts): layers alike share one
# decision. The number of tokens is not in it: it differs from rank to rank, and all must decide in the same step.
# Lives as long as the process.
_decisions: dict[tuple[Any, ...], Timing] = {}


class AutoDispatcher(Dispatcher):
    """Stands for the fastest of the usable dispatchers; until the first step with gradients, for the first of them."""

    def __init__(self, group: ProcessGroup | None, num_experts: int, nodes: NodeGroups | None = None) -> None:
        super().__init__(group, num_experts, nodes)
        self.candidates: dict[str, Dispatcher] = {}
        self.reasons: dict[str, str] = {}
        for name in CANDIDATES:
            if name == "domino" and self.group_size == 1:
                self.reasons[name] = "a group of one has nothing to overlap"
                continue
            try:
                self.candidates[name] = get_dispatcher(name)(group, num_experts, nodes)
            except ValueError as error:  # for the same reason on every rank: sizes and device are the same
                self.reasons[name] = str(error)
        if nodes is not None:  # two stages send less between nodes and more within: which is faster is measured
            self.candidates[ONE_STAGE] = get_dispatcher("fused")(group, num_experts)
        self.chosen: str | None = None

    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: LocalExperts
    ) -> Tensor:
        """See :class:`hf_fsdpturbo.dispatch.dispatcher.Dispatcher`."""
        if self.chosen is None and torch.is_grad_enabled():
            self.chosen = self._decide(hidden_states, top_k_index, top_k_weights, experts)
        return self._current(hidden_states, top_k_index, top_k_weights, experts)

    @property
    def _current(self) -> Dispatcher:
        return self.candidates[self.chosen or next(iter(self.candidates))]

    def _decide(self, hidden_states: Tensor, index: Tensor, weights: Tensor, experts: LocalExperts) -> str:
        self._drop_unusable(index.shape[1], hidden_states.dtype, experts)
        sizes = tuple(tuple(weight.shape) for weight in experts.weights()) if experts.is_plain_swiglu else None
        key = (self.group, self.num_experts, hidden_states.shape[1], index.shape[1], hidden_states.dtype, sizes)
        if key not in _decisions:
            hidden = hidden_states.detach().requires_grad_()
            routing = weights.detach().requires_grad_()
            steps = {
                name: lambda dispatcher=dispatcher: dispatcher(hidden, index, routing, experts)
                for name, dispatcher in self.candidates.items()
            }
            _decisions[key] = timing = time_dispatchers(steps, torch.ones_like(hidden), self.reasons)
            if not dist.is_initialized() or dist.get_rank() == 0:
                logger.warning(
                    "ep_dispatcher=auto: one MoE layer, forward + backward, %d tokens on rank 0:\n%s",
                    hidden.shape[0],
                    timing.table(),
                )
        return _decisions[key].fastest

    def _drop_unusable(self, top_k: int, dtype: torch.dtype, experts: LocalExperts) -> None:
        """Leave out candidates whose limits show at the first call only; the same ones on every rank."""
        for name, dispatcher in list(self.candidates.items()):
            try:
                dispatcher.check_call(top_k, dtype, experts)
            except ValueError as error:
                self.reasons[name] = str(error)
                del self.candidates[name]
