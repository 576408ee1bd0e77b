"""What a rank holds all through training: weights, gradients, optimizer, bf16 copies, LoRA, DPO's reference.

Dim 0 of a dense parameter is cut into ``mp_shard_size`` equal parts, the last ones short or empty: counted is the
first rank, which has the most. Experts are cut into ``ep_size * efsdp_size * cp_size`` parts, which are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from hf_fsdpturbo.plan.planned_run import FROZEN, PlannedRun
from hf_fsdpturbo.plan.shape import ExpertShape, ModelShape, Part, Unit

LORA_BYTES = 4  # adapters are float32, as PEFT makes them
MOMENTS = 2  # AdamW's, each in the dtype of its weight
_BLOCKS = {"adamw_8bit": (8, 256), "adamw_4bit": (4, 128)}
"""Optimizer -> bits of a moment's element, and elements that share a float32 scale; as torchao has them, which leaves
a shard of fewer than 4096 elements, or that blocks do not divide, in full."""


@dataclass(frozen=True)
class Held:
    """Bytes of a rank by kind."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    copies: int = 0
    reference: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Held)))

    @property
    def always(self) -> int:
        """All but gradients, which come and go in a step."""
        return self.weights + self.optimizer + self.copies + self.reference


def local_numel(part: Part, shards: int) -> int:
    """Elements of the first of ``shards`` ranks."""
    if not part.shape or shards == 1:
        return part.numel
    return -(-part.shape[0] // shards) * (part.numel // max(part.shape[0], 1))


def dense_bytes(unit: Unit, shards: int) -> int:
    """Bytes of a unit's parameters on the first rank."""
    sharded = sum(local_numel(part, shards) * part.stored for part in unit.sharded)
    return sharded + sum(part.numel * part.stored for part in unit.whole)


def unpacked_less(unit: Unit, run: PlannedRun) -> int:
    """Bytes of a unit on the first rank that frozen linear layers save where they are in 4 bits; routers are not."""
    if run.frozen != "nf4":
        return 0
    routers = {experts.num_experts for experts in unit.experts}
    count = sum(inputs * outputs for inputs, outputs in unit.linears.values() if outputs not in routers)
    stored = max((part.stored for part in unit.sharded), default=0)
    return int(count * (stored - FROZEN["nf4"])) // run.topology.mp_shard_size


def stack_bytes(part: Part, run: PlannedRun) -> int:
    """Bytes of a stack of experts, all of it; biases stay in full."""
    is_packed = run.frozen != "full" and len(part.shape) == 3
    return int(part.numel * FROZEN[run.frozen]) if is_packed else part.numel * part.stored


def expert_bytes(experts: ExpertShape, run: PlannedRun) -> tuple[int, int]:
    """``(elements, bytes)`` of a rank's experts; what all experts share is whole on every rank."""
    ways = run.topology.ep_size * run.topology.expert_shard_size
    elements = sum(part.numel for part in experts.stacked) // ways
    shared = sum(part.numel * part.stored for part in experts.shared)
    stored = sum(stack_bytes(part, run) for part in experts.stacked) // ways
    return elements, stored + shared


def holds_whole(experts: ExpertShape, run: PlannedRun) -> bool:
    """Whether FSDP has nothing to do: Note [Experts that one rank holds whole] of ``sharding/expert_fsdp.py``."""
    sizes = run.topology
    converted = run.storage == "float32" and not (experts.is_plain and not run.lora_r)
    if run.offload:
        return False
    return sizes.world_size == 1 or (sizes.expert_shard_size == sizes.edp_size == 1 and not converted)


def moment_bytes(elements: int, stored: int, run: PlannedRun) -> int:
    """Bytes of both moments of one tensor's local ``elements``, ``stored`` bytes each as weights."""
    bits, block = _BLOCKS.get(run.optimizer, (8 * stored, 0))
    if not block or elements < 4096 or elements % block:
        return MOMENTS * elements * stored
    return MOMENTS * (elements * bits // 8 + elements // block * 4)


def optimizer_bytes(unit: Unit, run: PlannedRun) -> int:
    """Bytes of a unit's moments on the first rank, all weights trained."""
    shards, ways = run.topology.mp_shard_size, run.topology.ep_size * run.topology.expert_shard_size
    parts = [(local_numel(part, shards), part.stored) for part in unit.sharded]
    parts += [(part.numel, part.stored) for part in unit.whole]
    for experts in unit.experts:
        parts += [(part.numel // ways, part.stored) for part in experts.stacked]
        parts += [(part.numel, part.stored) for part in experts.shared]
    return sum(moment_bytes(elements, stored, run) for elements, stored in parts)


def lora_bytes(unit: Unit, run: PlannedRun) -> int:
    """Bytes of a layer's adapters on a rank: A and B of every place."""
    if not run.lora_r:
        return 0
    dense = 0
    if run.lora_targets in ("attention", "all"):
        places = [sizes for name, sizes in unit.linears.items() if "attn" in name or "attention" in name]
        dense = sum(run.lora_r * (inputs + outputs) for inputs, outputs in places)
    ways = run.topology.ep_size * run.topology.expert_shard_size
    routed = 0
    if run.lora_targets in ("experts", "all"):
        for experts in unit.experts:
            matrices = [part.shape for part in experts.stacked if len(part.shape) == 3]
            routed += sum(n * run.lora_r * (rows + columns) for n, rows, columns in matrices) // ways
    return LORA_BYTES * (-(-dense // run.topology.mp_shard_size) + routed)


def held_by(unit: Unit, run: PlannedRun) -> Held:
    """Of one unit."""
    weights, copies = dense_bytes(unit, run.topology.mp_shard_size) - unpacked_less(unit, run), 0
    for experts in unit.experts:
        elements, stored = expert_bytes(experts, run)
        weights += stored
        converted = run.storage == "float32" and experts.is_plain and holds_whole(experts, run)
        if converted and not run.lora_r and keeps_copies(run):
            copies += elements * run.compute_bytes
    reference = weights if run.task == "dpo" and not run.lora_r else 0
    if run.lora_r:
        adapters = lora_bytes(unit, run)
        return Held(weights + adapters, adapters, MOMENTS * adapters, 0, reference)
    return Held(weights, weights, optimizer_bytes(unit, run), copies, reference)


def keeps_copies(run: PlannedRun) -> bool:
    """Whether our view of the experts converts them; in one process ``eager`` leaves a model's own forward."""
    return run.topology.world_size > 1 or run.dispatcher != "eager"


def held(shape: ModelShape, run: PlannedRun) -> Held:
    """Of the whole model."""
    total = Held()
    for unit in shape.units:
        total += held_by(unit, run)
    return total


def host_bytes(shape: ModelShape, run: PlannedRun) -> int:
    """Host memory of a rank while it loads onto an accelerator: three of its largest stacked tensors at most."""
    ways = run.topology.ep_size * run.topology.expert_shard_size
    stacked = [part.numel * part.stored // ways for unit in shape.layers for e in unit.experts for part in e.stacked]
    dense = [part.numel * part.stored for unit in shape.units for part in unit.sharded]
    return max(3 * max(stacked, default=0), max(dense, default=0))
