"""``RouterFields``: the fields of the arguments that say how routers learn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from hf_fsdpturbo.arguments.defaults import UnsetFloat, UnsetInt


@dataclass
class RouterFields:
    """Part of ``FSDPTurboArguments``; see ``docs/routers.md``."""

    router_bias_update_rate: float | None = field(
        default=None,
        metadata={"help": "Balance experts without a loss: what a step adds to, or takes from, a correction bias."},
    )
    router_lr_scale: float = field(
        default=UnsetFloat(1.0), metadata={"help": "Learning rate of routers, as a part of the others'."}
    )
    freeze_routers: bool = field(default=cast(bool, UnsetInt(0)), metadata={"help": "Do not train routers."})
