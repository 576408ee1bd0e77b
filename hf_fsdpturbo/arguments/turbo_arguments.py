"""``FSDPTurboArguments``: the fields that hf_fsdpturbo adds to any TrainingArguments, mixed in before it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from hf_fsdpturbo import launch_config
from hf_fsdpturbo.arguments.defaults import UnsetDict, UnsetFloat, UnsetInt, UnsetStr, is_given
from hf_fsdpturbo.arguments.params import FSDPTurboParams, InitParams, KernelParams
from hf_fsdpturbo.arguments.resolved import Resolved, resolved_from
from hf_fsdpturbo.arguments.router_fields import RouterFields
from hf_fsdpturbo.arguments.saving_fields import SavingFields
from hf_fsdpturbo.arguments.sources import (
    PUBLIC_DEFAULTS,
    SHORTHAND,
    reduce_to_one_process,
    resolve_settings,
    sizes_of,
)
from hf_fsdpturbo.arguments.unsupported import refuse_unsupported, settle_after_setup
from hf_fsdpturbo.arguments.watch_fields import WatchFields
from hf_fsdpturbo.compat import check_floors, require
from hf_fsdpturbo.topology import Topology, at_most

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def _warn_once(topic: str, message: str) -> None:
    """One warning on a topic a process, on rank 0 (arguments are built again whenever they are copied)."""
    if topic not in _warned and launch_config.rank() == 0:
        logger.warning(message)
    _warned.add(topic)


@dataclass
class FSDPTurboArguments(SavingFields, RouterFields, WatchFields):
    """Fields for expert parallelism; mix in before ``TrainingArguments``, ``SFTConfig``, ``DPOConfig`` and so on.

    After construction every field holds the value in force, ``dist_config`` the complete mapping (plain JSON types).
    Other code reads ``fsdpturbo_params``, ``kernel_params`` and ``init_params``. Where values come from, and what
    counts as given: see ``sources.py``.
    """

    # The order dict | str | None matters: HfArgumentParser then takes text (JSON or a path) from the command line.
    dist_config: dict | str | None = field(
        default=None,
        metadata={"help": "Sharding parameters: a mapping, a JSON string, or the path of a YAML/JSON file."},
    )
    ep_size: int | None = field(
        default=None, metadata={"help": "Short for dist_config ep_size: ranks that share the experts."}
    )
    ep_dispatcher: str | None = field(
        default=None, metadata={"help": "Short for dist_config ep_dispatcher: eager, fused, mc2, domino or auto."}
    )
    dp_size: int | None = field(
        default=None, metadata={"help": "Data-parallel size; world size / cp_size when left out."}
    )
    cp_size: int = field(default=UnsetInt(1), metadata={"help": "Ulysses context-parallel size."})
    cp_mode: str = field(default="ulysses", metadata={"help": "Kind of context parallelism; only ulysses."})
    mp_replicate_size: int = field(default=UnsetInt(1), metadata={"help": "Replicas of the outer FSDP2 (HSDP)."})
    mp_shard_size: int | None = field(
        default=None,
        metadata={"help": "Ranks that shard the dense weights; world size / mp_replicate_size when left out."},
    )
    ranks_per_node: int | None = field(
        default=None,
        metadata={"help": "Neighbouring ranks that share a node; LOCAL_WORLD_SIZE when left out."},
    )
    dist_timeout: int | None = field(
        default=None,
        metadata={"help": "Timeout of collectives in seconds, that of every mesh group; ddp_timeout when left out."},
    )
    # A field of TrainingArguments, here again only so that its default can be told from an explicit 1800.
    ddp_timeout: int = field(default=UnsetInt(1800), metadata={"help": "Set by dist_timeout, if given."})
    kernel_config: dict | str | None = field(
        default=None,
        metadata={"help": "Kernels to use: a mapping, a JSON string, or the path of a YAML/JSON file."},
    )
    init_config: dict | str | None = field(
        default_factory=lambda: UnsetDict(name="init_on_meta"),
        metadata={"help": "How weights are read: name init_on_meta, init_on_rank0 or init_on_default."},
    )
    drop_unused_tensors: bool = field(
        default=cast(bool, UnsetInt(0)), metadata={"help": "Do not save tensors that the model does not use."}
    )
    check_loading: str = field(
        default=UnsetStr("sample"), metadata={"help": "What is compared with the files afterwards: sample, full, off."}
    )
    optim_implementation: str = field(
        default=UnsetStr("auto"),
        metadata={
            "help": "Who computes optim adamw_torch(_fused): auto (fsdpturbo on CUDA), fsdpturbo (clip, decay and "
            "update in one pass) or torch."
        },
    )
    recompute: str = field(
        default=UnsetStr("full"), metadata={"help": "With activation_checkpointing: full or selective (keeps dear)."}
    )
    fused_linear_cross_entropy: str = field(
        default=UnsetStr("auto"),
        metadata={"help": "SFT: gradients of the LM head in its forward: auto (on an accelerator), on or off."},
    )
    on_nonfinite: str = field(
        default=UnsetStr("warn"), metadata={"help": "A gradient norm that is not finite: warn, skip the step or stop."}
    )

    if TYPE_CHECKING:  # what TrainingArguments, the next class in the method resolution order, brings
        use_cpu: bool = field(default=False, init=False)
        bf16: bool = field(default=False, init=False)
        _n_gpu: int = field(default=1, init=False)

        @property
        def world_size(self) -> int: ...
        @property
        def process_index(self) -> int: ...
        @property
        def device(self) -> Any: ...

    def __post_init__(self) -> None:
        check_floors()
        launch = self._resolve()
        self._set_timeout()
        if launch.use_cpu:
            self.use_cpu = True  # accelerate does not hand it to the processes it starts
        refuse_unsupported(self)
        super().__post_init__()  # type: ignore[misc]
        self._settle(launch)

    def _resolve(self) -> launch_config.LaunchConfig:
        """Merge the sources, and write what is in force onto the fields."""
        given = {name: getattr(self, name) for name in PUBLIC_DEFAULTS}
        settings, launch = resolve_settings(given, bool(getattr(self, "use_cpu", False)))
        launch_config.refuse_foreign_environment()
        if launch.distributed_type == "MULTI_NPU" and launch_config.world_size() > 1 and not launch.use_cpu:
            require("torch_npu", f"distributed_type: MULTI_NPU in {launch.path}")
        self._adopt(resolved_from(settings, settings, launch))
        return launch

    def _settle(self, launch: launch_config.LaunchConfig) -> None:
        """What needs the device and the process group, which ``TrainingArguments.__post_init__`` sets up."""
        self._check_launch(launch)
        self._fit_one_process()
        _ = self.fsdpturbo_topology  # sizes that do not fit are refused here, before a data set is read
        settle_after_setup(self)
        self._warn()

    def _adopt(self, resolved: Resolved) -> None:
        """Write the values in force onto the fields.

        A size reduced for one process is marked as unset, or a copy would take it for the user's.
        """
        self._fsdpturbo = resolved
        for name in PUBLIC_DEFAULTS:
            if name != "dist_config" and name not in SHORTHAND:
                value = resolved.effective[name].value
                reduced = value != resolved.settings[name].value and value is not None
                setattr(self, name, UnsetInt(value) if reduced else value)
        self.dist_config = resolved.params.to_dict()
        self.ep_size, self.ep_dispatcher = resolved.params.ep_size, resolved.params.ep_dispatcher

    def to_dict(self) -> dict[str, Any]:
        """As ``TrainingArguments`` does it, in plain types: YAML writers refuse subclasses of int and float."""
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        plain = {UnsetInt: int, UnsetFloat: float}
        return {name: plain.get(type(value), lambda as_it_is: as_it_is)(value) for name, value in values.items()}

    def _set_timeout(self) -> None:
        """``ddp_timeout`` is the one in force; what ``dist_timeout`` sets there is ours, and a copy may change it."""
        at_most("ddp_timeout", self.ddp_timeout)
        if self.dist_timeout is None:
            return
        if is_given(self.ddp_timeout) and self.ddp_timeout != self.dist_timeout:
            raise ValueError(
                f"ddp_timeout={self.ddp_timeout} contradicts dist_timeout={self.dist_timeout}, which sets it. "
                "Give dist_timeout only."
            )
        self.ddp_timeout = UnsetInt(self.dist_timeout)

    def _check_launch(self, launch: launch_config.LaunchConfig) -> None:
        """Compare what the launcher promised with what ``TrainingArguments`` made of it."""
        launched, joined = launch_config.world_size(), self.world_size
        if launched != joined:
            raise ValueError(
                f"The launcher started WORLD_SIZE={launched} processes, but this one has joined a world of {joined}: "
                "each would train on its own. On CPU set use_cpu=True (use_cpu: true in the recipe or the accelerate "
                "config)."
            )
        wanted = launch.mixed_precision or launch_config.exported_mixed_precision()
        mine = "bf16" if self.bf16 else "no"
        if wanted not in (None, mine):
            raise ValueError(
                f"mixed_precision={wanted} ({launch.path or launch.found_by}) differs from the training arguments, "
                f"where bf16={mine == 'bf16'}. Set bf16={wanted == 'bf16'}, or correct mixed_precision."
            )

    def _fit_one_process(self) -> None:
        if self.world_size > 1:
            return
        current = self._fsdpturbo
        effective, changed = reduce_to_one_process(current.settings)
        if changed:
            was = ", ".join(f"{key.removeprefix('dist_config.')}={current.settings[key].value}" for key in changed)
            _warn_once("one process", f"One process: {was} (environment or accelerate YAML) reduced to 1.")
            self._adopt(resolved_from(current.settings, effective, current.launch))
        if getattr(self, "_n_gpu", 1) > 1:
            _warn_once(
                "n_gpu", f"One process sees {self._n_gpu} GPUs and trains on one. Start one process a GPU to use all."
            )
            self._n_gpu = 1  # else the Trainer wraps the model in DataParallel

    def _warn(self) -> None:
        if not getattr(self, "average_tokens_across_devices", True):
            _warn_once(
                "average_tokens_across_devices",
                "average_tokens_across_devices=False: each rank's loss is averaged over its own tokens, so a token "
                "weighs more on a rank that has few.",
            )
        if self.world_size > 1 and getattr(self, "use_liger_kernel", False):
            _warn_once(
                "liger swiglu",
                "use_liger_kernel: Liger's swiglu is off, as it would replace the experts' forward past the "
                "dispatcher. Dense MLPs and shared experts run the model's own code too.",
            )
        if self.recompute != "full" and not getattr(self, "activation_checkpointing", False):
            _warn_once("recompute", f"recompute={self.recompute!r} has no effect without activation_checkpointing.")
        if not self.fsdpturbo_params.pin_memory and not self.fsdpturbo_params.offload_params:
            _warn_once("pin_memory", "dist_config pin_memory=False has no effect without offload_params.")

    @property
    def fsdpturbo_params(self) -> FSDPTurboParams:
        """The checked ``dist_config``.

        Raises:
            ValueError: ``ep_size``, ``ep_dispatcher`` or ``dist_config`` was assigned after construction, where it
                would have no effect.
        """
        params = self._fsdpturbo.params
        for name, built in (
            ("ep_size", params.ep_size),
            ("ep_dispatcher", params.ep_dispatcher),
            ("dist_config", params.to_dict()),
        ):
            if getattr(self, name) != built:
                raise ValueError(
                    f"{name} was changed to {getattr(self, name)!r} after the arguments were built with {built!r}. "
                    f"Give {name} when building them."
                )
        return params

    @property
    def fsdpturbo_topology(self) -> Topology:
        """The sizes of this run, those that were left open filled in.

        Raises:
            ValueError: they do not fit; naming field, value, rule and fix.
        """
        return Topology.resolve(self.world_size, **sizes_for_world(self, self.world_size))

    @property
    def kernel_params(self) -> KernelParams | None:
        """The checked ``kernel_config``; None when no kernels were asked for."""
        return self._fsdpturbo.kernels

    @property
    def init_params(self) -> InitParams:
        """The checked ``init_config``."""
        return self._fsdpturbo.init


def sizes_for_world(args: FSDPTurboArguments, world: int) -> dict[str, Any]:
    """Keyword arguments of ``Topology.resolve`` for a run of ``world`` processes.

    With one process, sizes that came from the environment or the accelerate YAML are reduced to 1; sizes given on the
    command line or in Python stay, so that ``Topology.resolve`` refuses those that do not fit.
    """
    return sizes_of(args._fsdpturbo.settings, world)
