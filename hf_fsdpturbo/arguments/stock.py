"""Stock training arguments (or none) in a run of one process: our settings, worked out beside them.

What the environment and the accelerate YAML say of hf_fsdpturbo holds there too; the trainer keeps the very object
that it was given.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from hf_fsdpturbo import launch_config
from hf_fsdpturbo.arguments.turbo_arguments import FSDPTurboArguments
from hf_fsdpturbo.arguments.unsupported import refuse_unsupported


def settings_beside(args: Any) -> FSDPTurboArguments:
    """A copy of ``args`` with the fields of :class:`FSDPTurboArguments`, which nobody has given on it.

    Raises:
        ValueError: more than one process, or not training arguments; a setting that cannot work in one process.
    """
    from transformers import TrainingArguments

    if not isinstance(args, TrainingArguments) or launch_config.world_size() > 1:
        where = f" in a run of {launch_config.world_size()} processes" if isinstance(args, TrainingArguments) else ""
        raise ValueError(
            f"args must extend FSDPTurboArguments{where}, but it is {type(args).__name__}. Use "
            "FSDPTurboTrainingArguments, FSDPTurboSFTConfig, FSDPTurboDPOConfig or FSDPTurboRewardConfig."
        )
    stock = type(args)
    extended: Any = dataclasses.dataclass(type(f"FSDPTurbo{stock.__name__}", (FSDPTurboArguments, stock), {}))
    copy = cast(FSDPTurboArguments, extended.__new__(extended))
    for field in dataclasses.fields(FSDPTurboArguments):
        unset = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        setattr(copy, field.name, unset)
    _ = args.n_gpu  # sets its device up
    vars(copy).update(vars(args))
    launch = copy._resolve()
    refuse_unsupported(copy)
    copy._settle(launch)
    args._n_gpu = cast(Any, copy)._n_gpu  # several devices in sight: one is used
    return copy
