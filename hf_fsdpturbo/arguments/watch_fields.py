"""``WatchFields``: the fields of the arguments that say how a run is watched."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class WatchFields:
    """Part of ``FSDPTurboArguments``; see ``docs/watching.md`` and ``docs/telemetry.md``."""

    hang_timeout: int | None = field(
        default=None,
        metadata={"help": "Seconds without a step until stacks are written and the run ends (docs/watching.md)."},
    )
    fsdpturbo_metrics: bool | None = field(
        default=None,
        metadata={"help": "Log speed, memory and expert load (docs/telemetry.md); left out: in sharded runs."},
    )
