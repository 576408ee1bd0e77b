"""The moments of a training step, what a rank's memory holds in each by kind, and the highest of them.

    forward's end   all layers' activations, the LM head's work
    layer l         gradients of the layers after l, activations up to l, what backward of l works with
    root            all gradients, the embedding whole with its gradient
    optimizer       all gradients, nothing else

It is from the second step on: AdamW's moments are there. Memory that CUDA, NCCL and fragments take comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_fsdpturbo.lm_head.linear_cross_entropy import tile_rows
from hf_fsdpturbo.plan.activations import exchanged_rows, kept, kept_whole, worked_with
from hf_fsdpturbo.plan.held import Held, expert_bytes, held, held_by, holds_whole, stack_bytes
from hf_fsdpturbo.plan.planned_run import PlannedRun
from hf_fsdpturbo.plan.shape import ModelShape, Unit

GIB = 2**30
KINDS = (
    "weights", "gradients", "optimizer", "expert copies", "reference", "activations", "backward's work",
    "dispatch buffers", "LM head", "gathered units",
)  # fmt: skip
_NAMED = {"work": "backward's work", "dispatch": "dispatch buffers", "head": "LM head", "units": "gathered units"}
_TRL_CHUNK = 256  # tokens whose logits TRL's fused head has at once
_LOGITS_OF_DPO = 3  # logits, their log-softmax, their gradient


@dataclass(frozen=True)
class Moment:
    """One moment of a step: its name, and bytes of a rank by kind."""

    name: str
    kinds: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    def gib(self, kind: str | None = None) -> float:
        """GiB of one kind, or of all."""
        return (self.total if kind is None else self.kinds.get(kind, 0)) / GIB


@dataclass(frozen=True)
class _Step:
    """What the moments are made of; bytes of a rank."""

    shape: ModelShape
    run: PlannedRun
    held: Held
    layers: tuple[Held, ...]
    root: Held
    head: Held

    @classmethod
    def of(cls, shape: ModelShape, run: PlannedRun) -> _Step:
        if run.offload:  # all that is held is on the host; a unit comes when it computes
            return cls(shape, run, Held(), (Held(),) * len(shape.layers), Held(), Held())
        layers = tuple(held_by(unit, run) for unit in shape.layers)
        return cls(shape, run, held(shape, run), layers, held_by(shape.root, run), held_by(shape.head, run))

    @property
    def head_in_root(self) -> bool:
        """Whether the head's gradient stays whole until the root is reduced."""
        ours = self.run.fused_head and self.run.task == "sft" and not self.run.lora_r
        return not self.shape.head.sharded or not ours

    def moment(self, name: str, gradients: int, **kinds: int) -> Moment:
        """A moment; kinds are written with underscores, and gradients stand all the time where they add up."""
        always = self.held
        if self.run.accumulation > 1:
            gradients = max(gradients, always.gradients)
        found = {
            "weights": always.weights, "gradients": gradients, "optimizer": always.optimizer,
            "expert copies": always.copies, "reference": always.reference,
        }  # fmt: skip
        found |= {_NAMED.get(kind, kind): size for kind, size in kinds.items()}
        return Moment(name, {kind: found.get(kind, 0) for kind in KINDS})


def gathered(unit: Unit, run: PlannedRun) -> int:
    """Bytes of a unit while its module computes, in the dtype it computes in; of packed experts their bytes."""
    total = 0
    if run.topology.world_size > 1:
        total = sum(part.numel * part.gathered for part in unit.sharded)
        if run.frozen != "full":
            stacked = sum(stack_bytes(part, run) for experts in unit.experts for part in experts.stacked)
            return total + (stacked // run.topology.ep_size if run.topology.expert_shard_size > 1 else 0)
        through = sum(experts.numel for experts in unit.experts if not holds_whole(experts, run))
        total += through // run.topology.ep_size * run.compute_bytes
    return total


def opened(unit: Unit, run: PlannedRun) -> int:
    """Bytes of packed experts in full for the length of one call; where they have adapters, a stack's gradient too."""
    if run.frozen == "full":
        return 0
    stacks = [part.numel for experts in unit.experts for part in experts.stacked if len(part.shape) == 3]
    gradient = max(stacks, default=0) if run.lora_targets != "attention" else 0
    return (sum(stacks) + gradient) // run.topology.ep_size * run.compute_bytes


def reduced(unit: Unit, run: PlannedRun) -> int:
    """Bytes of a unit's whole gradient and of FSDP's float32 buffer for it."""
    if run.topology.world_size == 1 or run.lora_r:
        return 0
    total = sum(part.numel * (part.gathered + 4) for part in unit.sharded)
    through = sum(experts.numel for experts in unit.experts if not holds_whole(experts, run))
    return total + through // run.topology.ep_size * (run.compute_bytes + 4)


def head_bytes(shape: ModelShape, run: PlannedRun) -> int:
    """Bytes that the LM head and its loss work with at the forward's end."""
    config, tokens, b = shape.config, run.tokens_at_head, run.compute_bytes
    vocabulary, hidden = config.vocab_size, config.hidden_size
    if run.task == "reward":
        return tokens * hidden * (4 + b)
    if run.task == "dpo":
        return _LOGITS_OF_DPO * tokens * vocabulary * b
    trained = 0 if run.lora_r else vocabulary * hidden
    if not run.fused_head:
        return trained * b + _TRL_CHUNK * vocabulary * (b + 4) + tokens * hidden * b
    rows = min(tile_rows(tokens, vocabulary, b, "cuda"), tokens)
    return 4 * trained + rows * vocabulary * b + tokens * hidden * (4 + b)


def moments(shape: ModelShape, run: PlannedRun) -> list[Moment]:
    """Every moment of a step, in order."""
    step = _Step.of(shape, run)
    T, activations = run.tokens, [run.tokens * kept(unit, shape, run) for unit in shape.layers]
    root = gathered(shape.root, run)
    whole_head = gathered(shape.head, run)
    found = [
        step.moment(
            "LM head",
            0,
            activations=sum(activations) + 2 * T * shape.config.hidden_size * run.stream_bytes,
            head=head_bytes(shape, run),
            units=root + whole_head,
        )
    ]
    late = 0  # the head's gradient, whole until the root is reduced
    if step.head_in_root:
        root += whole_head
        late = sum(p.numel * p.gathered for p in shape.head.sharded) if run.topology.world_size > 1 else 0
        late = 0 if run.lora_r else late
    known = step.root.gradients if not shape.head.sharded else (0 if late else step.head.gradients)
    for index in reversed(range(len(shape.layers))):
        after = sum(layer.gradients for layer in step.layers[index + 1 :])
        found += _backward(step, index, known + after, sum(activations[: index + 1]), root + late)
    buffers = reduced(shape.root, run) + (reduced(shape.head, run) if step.head_in_root else 0)
    found.append(step.moment("root", step.held.gradients, units=root + buffers))
    return [*found, step.moment("optimizer", step.held.gradients)]


def _backward(step: _Step, index: int, gradients: int, activations: int, units: int) -> list[Moment]:
    """Moments of one layer's backward: before and with its experts' gradients, and while they are converted."""
    shape, run = step.shape, step.run
    unit = shape.layers[index]
    units += gathered(unit, run) + (gathered(shape.layers[index - 1], run) if index else 0) + opened(unit, run)
    if index + 1 < len(shape.layers):
        units += reduced(replace(shape.layers[index + 1], experts=()), run)
    if run.recompute != "off":
        activations += run.tokens * (kept_whole(unit, shape, run) - kept(unit, shape, run))
    before, beside = (run.tokens * size for size in worked_with(unit, shape.config, run))
    rows = run.tokens * exchanged_rows(unit, shape.config, run)
    elements = stored = 0
    for experts in unit.experts:
        elements += experts.numel // run.topology.ep_size
        stored += expert_bytes(experts, run)[1]
    if run.lora_r:
        elements = stored = 0
    own = elements * run.compute_bytes
    whole = all(holds_whole(experts, run) for experts in unit.experts)
    final = stored if whole else elements * 4  # our view converts, or FSDP's buffer is float32
    name = f"layer {index}"
    found = [
        step.moment(name, gradients + own // 3, activations=activations, work=before, dispatch=rows, units=units),
        step.moment(name, gradients + own, activations=activations, work=beside, dispatch=rows, units=units),
    ]
    if final > own:  # the last of two matrices is converted while both are there: two thirds of the elements, then all
        left = max(0, activations - run.tokens * kept_whole(unit, shape, run) // 2)
        found.append(step.moment(name, gradients + own + 2 * final // 3, activations=left, units=units))
    return found


def highest(shape: ModelShape, run: PlannedRun) -> Moment:
    """The moment with the most memory."""
    return max(moments(shape, run), key=lambda moment: moment.total)
