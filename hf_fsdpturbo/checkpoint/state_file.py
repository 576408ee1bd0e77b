"""``trainer_state.json`` of a checkpoint that is resumed: Transformers believes whatever stands there."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any

from hf_fsdpturbo.bounded import cut
from hf_fsdpturbo.checkpoint.commit import COMPLETE, read_json

STATE = "trainer_state.json"
_COUNTS = ("global_step", "max_steps", "num_train_epochs", "num_input_tokens_seen")
_NUMBERS = ("epoch", "total_flos", "best_metric", "logging_steps", "eval_steps", "save_steps")
_STEPS = {"logging_steps": "logging_strategy", "eval_steps": "eval_strategy", "save_steps": "save_strategy"}
_NAME = re.compile(r"checkpoint-(\d+)")


def check_state(directory: str, args: Any) -> None:
    """Compare the file with what Transformers makes of it and with the checkpoint it lies in; none there is no fault.

    Args:
        directory: the checkpoint's.
        args: training arguments of the run that goes on.

    Raises:
        ValueError: a field that is unknown or of a wrong kind, another step than the checkpoint's, or a number of
            steps that this run would divide by; names file and field.
    """
    from transformers import TrainerState

    path = os.path.join(directory, STATE)
    if not os.path.isfile(path):
        return
    state = read_json(path)
    again = "Copy the file again, or choose another checkpoint."
    if not isinstance(state, dict):
        raise ValueError(f"{path} must hold a mapping, but it is {cut(state)}. {again}")
    unknown = sorted(set(state) - {field.name for field in dataclasses.fields(TrainerState)})
    if unknown:
        raise ValueError(f"{path} has the unknown fields {cut(unknown)}. {again}")
    if "global_step" not in state:
        raise ValueError(f"{path} has no global_step. {again}")
    for name, value in state.items():
        if not _fits(name, value):
            raise ValueError(f"{path}: {name}={cut(value)} is no {_kind(name)}. {again}")
    step, most = state["global_step"], state.get("max_steps") or 0
    told = _told_step(directory)
    if told is not None and told != step:
        raise ValueError(f"{path}: global_step={cut(step)}, but the checkpoint is of step {told}. {again}")
    if 0 < most < step:
        raise ValueError(f"{path}: global_step={cut(step)} is more than max_steps={cut(most)}. {again}")
    for name, strategy in _STEPS.items():
        if getattr(args, strategy) == "steps" and name in state and not (state[name] or 0) >= 1:
            raise ValueError(
                f"{path}: {name}={cut(state[name])}, which Transformers takes instead of this run's, but {strategy} "
                f"is 'steps'. Write the number of steps into the file, or set {strategy} as that run had it."
            )


def _told_step(directory: str) -> int | None:
    """The step by the marker, else by the folder's name."""
    marker = os.path.join(directory, COMPLETE)
    if os.path.isfile(marker):
        told = read_json(marker)
        step = told.get("step") if isinstance(told, dict) else None
        if isinstance(step, int):
            return step
    match = _NAME.fullmatch(os.path.basename(os.path.normpath(directory)))
    return int(match[1]) if match else None


def _kind(name: str) -> str:
    if name in _COUNTS:
        return "whole number of 0 or more"
    return {"log_history": "list of mappings", "stateful_callbacks": "mapping"}.get(name, "number or nothing")


def _fits(name: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in _COUNTS:
        return is_number and isinstance(value, int) and -1 <= value < 2**63
    if name in _NUMBERS:
        return value is None or (is_number and (name == "best_metric" or math.isfinite(value)))
    if name == "log_history":
        return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    if name == "stateful_callbacks":
        return value is None or isinstance(value, dict)
    if name == "train_batch_size":
        return value is None or (is_number and isinstance(value, int) and value > 0)
    if name in ("best_model_checkpoint", "trial_name"):
        return value is None or isinstance(value, str)
    return True
