"""The two plan dataclasses, in the generation that `faults.configure` chose before the first access."""

import dataclasses
from typing import Any

from fsdp_turbo import faults


def _make(name: str, fields: dict[str, Any]) -> type:
    made = [(key, Any, dataclasses.field(default_factory=lambda v=value: v)) for key, value in fields.items()]
    return dataclasses.make_dataclass(name, made)


_EP = {"apply_modules": None, "dispatcher": None, "apply_efsdp_modules": None}
_FSDP = {
    "ignored_modules": [], "apply_modules": None, "param_dtype": None, "reduce_dtype": None, "output_dtype": None,
    "cast_forward_inputs": True, "cpu_offload": False, "pin_memory": True, "num_to_forward_prefetch": 0,
    "num_to_backward_prefetch": 0, "hook_modules": None, "fsdp_implementation": "native",
}  # fmt: skip


def __getattr__(name: str) -> type:
    new = faults.GENERATION == "NEW"
    if name == "EPPlanConfig":
        extra = {"fixed_router": False, "gradient_divide_factor": None} if new else {"_gradient_divide_factor": None}
        return _make(name, {**_EP, **({} if faults.GENERATION == "NONE" else extra)})
    if name == "FSDPPlanConfig":
        extra = {"gradient_divide_factor": None} if new else {"param_init_fn": None, "reshard_after_forward": True}
        return _make(name, {**_FSDP, **extra})
    raise AttributeError(name)
