"""What a planned run is asked to do: the layout and the settings that memory depends on, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_fsdpturbo.topology import Topology, positive

STORAGES = ("bfloat16", "float32")
TASKS = ("sft", "dpo", "reward")
RECOMPUTES = ("off", "full", "selective")
DISPATCHERS = ("fused", "domino", "eager", "mc2")
HEADS = ("on", "off")
OPTIMIZERS = ("adamw", "adamw_8bit", "adamw_4bit")
LORA_TARGETS = ("attention", "experts", "all")
FROZEN = {"full": 0.0, "nf4": 0.5 + 4 / 64, "mxfp4": 0.5 + 1 / 32}
"""How frozen weights are held -> bytes of a packed element with its share of a scale."""


@dataclass(frozen=True)
class PlannedRun:
    """Settings of a run; every name is that of the argument.

    Attributes:
        topology: sizes, checked.
        sequence: tokens of a sample. batch: samples of a rank and micro-step.
        accumulation: micro-steps a step.
        fused_head: our LM head (``fused_linear_cross_entropy``), or TRL's.
        liger: Liger's (or another set's) rms_norm; without, a norm keeps its input in float32 as well.
        optimizer: AdamW with moments as its weights, or in blocks of 8 or 4 bits.
        offload: ``offload_params``: weights, gradients and optimizer are on the host.
        lora_r: rank of LoRA, 0 trains all weights.
        frozen: a key of :data:`FROZEN`: linear layers and experts (nf4), or experts (mxfp4), beside adapters.
    """

    topology: Topology
    sequence: int = 4096
    batch: int = 1
    accumulation: int = 1
    storage: str = "bfloat16"
    task: str = "sft"
    recompute: str = "off"
    dispatcher: str = "fused"
    fused_head: bool = True
    liger: bool = False
    optimizer: str = "adamw"
    offload: bool = False
    lora_r: int = 0
    lora_targets: str = "attention"
    frozen: str = "full"

    def __post_init__(self) -> None:
        for name in ("sequence", "batch", "accumulation"):
            positive(name, getattr(self, name))
        for name, value, allowed in (
            ("storage", self.storage, STORAGES),
            ("task", self.task, TASKS),
            ("recompute", self.recompute, RECOMPUTES),
            ("dispatcher", self.dispatcher, DISPATCHERS),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("lora_targets", self.lora_targets, LORA_TARGETS),
            ("frozen", self.frozen, FROZEN),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, but it is {value!r}. Use one of these.")
        if self.frozen != "full" and (self.offload or not self.lora_r):
            fix = "Leave offload out" if self.offload else "Set lora_r"
            raise ValueError(f"frozen={self.frozen} is of weights beside adapters on a device. {fix}, or frozen=full.")
        if self.offload and self.topology.world_size == 1:
            raise ValueError(
                "offload acts where FSDP shards, but devices is 1. Leave offload out, or plan more devices."
            )
        if self.sequence % self.topology.cp_size:
            raise ValueError(
                f"sequence ({self.sequence}) is cut into cp_size ({self.topology.cp_size}) equal parts. Choose a "
                "sequence that cp_size divides."
            )

    @property
    def tokens(self) -> int:
        """Tokens a rank takes through its layers in a micro-step; DPO has two answers a sample."""
        return self.tokens_at_head // self.topology.cp_size

    @property
    def tokens_at_head(self) -> int:
        """Tokens of a micro-step whose loss this rank computes: all of a cp group's."""
        return self.batch * self.sequence * (2 if self.task != "sft" else 1)

    @property
    def compute_bytes(self) -> int:
        """Bytes of what is computed in, bf16."""
        return 2

    @property
    def stream_bytes(self) -> int:
        """Bytes of the stream between layers: as weights are stored (as under autocast)."""
        return 4 if self.storage == "float32" else 2


@dataclass(frozen=True)
class Asked:
    """One line of ``plan``: the model, devices, memory, and the run that sizes were given for."""

    model: str
    devices: int
    memory: float
    sizes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def run(self, **changed: Any) -> PlannedRun:
        """The run with other sizes or settings; sizes are those of ``Topology.resolve``.

        Raises:
            ValueError: they do not fit.
        """
        sizes = self.sizes | {key: value for key, value in changed.items() if key in self.sizes}
        settings = self.settings | {key: value for key, value in changed.items() if key in self.settings}
        return PlannedRun(Topology.resolve(self.devices, **sizes), **settings)
