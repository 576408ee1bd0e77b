"""``SetUp``: what happens round a parent trainer's ``__init__``: meshes before it, warm-up and a summary after it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import set_seed
from transformers.trainer_utils import enable_full_determinism

from hf_fsdpturbo import compat, grad_norm, launch_config
from hf_fsdpturbo.arguments import FSDPTurboArguments, bf16_storage_warning, describe_sources, settings_beside
from hf_fsdpturbo.optim.one_pass import in_one_pass
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.parallelize.trainer_family import default_arguments
from hf_fsdpturbo.ranks import everyone, raised_on_every_rank, rank
from hf_fsdpturbo.sharding.outer_fsdp import reshard
from hf_fsdpturbo.topology import Topology
from hf_fsdpturbo.trainer import collective_calls
from hf_fsdpturbo.trainer.chat_template import take_template
from hf_fsdpturbo.trainer.data_columns import check_data
from hf_fsdpturbo.trainer.given_arguments import GivenArguments
from hf_fsdpturbo.trainer.given_models import GivenModels
from hf_fsdpturbo.trainer.head_choice import HeadChoice
from hf_fsdpturbo.trainer.output_place import open_output_dir
from hf_fsdpturbo.trainer.planned_peak import PlannedPeak
from hf_fsdpturbo.trainer.reference import hash_shards, trainer_functions_replaced
from hf_fsdpturbo.trainer.refusals import (
    aux_loss_warning,
    refuse_foreign_parameters,
    refuse_missing_packages,
    refuse_model,
    refuse_optimizers,
    refuse_resizing,
    refuse_unsharded,
)
from hf_fsdpturbo.trainer.rows import rank0_first
from hf_fsdpturbo.trainer.sigterm import AgreedStop
from hf_fsdpturbo.trainer.start_summary import start_lines

logger = logging.getLogger(__name__)


def with_nodes(sizes: Topology, given: int | None) -> Topology:
    """``sizes`` with the launcher's ``LOCAL_WORLD_SIZE`` as ``ranks_per_node``, where the user gave none. Collective.

    Ranks that see different nodes would make different process groups, so all compare first. Nodes of different sizes
    are legal (a launcher with 8 ranks here and 4 there): then all ranks count as near.

    Raises:
        ValueError: ``ranks_per_node`` was given, and differs between ranks.
    """
    if sizes.world_size == 1:
        return sizes
    by_rank = everyone((given, launch_config.local_world_size()))
    if len({value for value, _ in by_rank}) > 1:
        raise ValueError(
            f"ranks_per_node must be the same on every rank, but by rank it is {[value for value, _ in by_rank]}. "
            "Set it in the arguments, or in one file that all ranks read."
        )
    if given is not None:
        return sizes
    local = sorted({near for _, near in by_rank})
    if len(local) == 1 and sizes.world_size % local[0] == 0:
        return replace(sizes, ranks_per_node=local[0])
    if sizes.ep_size > 1 and rank() == 0:
        logger.warning(
            "LOCAL_WORLD_SIZE is %s in a world of %d: nodes of different sizes. Experts exchange in one stage, as on "
            "one node. Set ranks_per_node to a size that divides all of them for two.",
            " and ".join(map(str, local)),
            sizes.world_size,
        )
    return sizes


class SetUp:
    """One trainer's way from the arguments it was given to a sharded model in the trainer behind the mixin.

    Args:
        trainer_class: the user's.
        given: its arguments.

    Attributes:
        parallel_state: the meshes, None in a run of one process.
        topology: the sizes.
        models: what it was given to shard.

    Raises:
        ValueError: arguments that cannot work; on every rank.
    """

    def __init__(self, trainer_class: type, given: GivenArguments) -> None:
        config = given.get("args")
        if not isinstance(config, FSDPTurboArguments):
            config = settings_beside(default_arguments(trainer_class) if config is None else config)
        self.trainer_class, self.given, self.config = trainer_class, given, config
        open_output_dir(config)
        refuse_missing_packages(config)
        check_data(trainer_class, given, config)
        refuse_model(given, config.world_size)
        refuse_optimizers(given, config.world_size)
        seed = cast(Any, config).seed
        enable_full_determinism(seed) if cast(Any, config).full_determinism else set_seed(seed)
        self.head = HeadChoice(trainer_class, given, config)
        self.topology = with_nodes(config.fsdpturbo_topology, config.ranks_per_node)
        self.parallel_state = self._meshes()
        self.models = GivenModels(trainer_class, given, config, self.parallel_state, self.head)
        self.peak = PlannedPeak(trainer_class, config, self.topology)

    def _meshes(self) -> FSDPTurboParallelState | None:
        sizes = self.topology
        if sizes.world_size == 1:
            return None
        compat.refuse_broken_torch(
            sizes.world_size, dist.get_backend(), sizes.cp_size, sizes.ep_size, edp_size=sizes.edp_size
        )
        timeout = timedelta(seconds=self.config.ddp_timeout)  # dist_timeout has set it
        return FSDPTurboParallelState.initialize(sizes, self.config.device.type, timeout=timeout)

    @contextlib.contextmanager
    def parent_arguments(self) -> Iterator[GivenArguments]:
        """While open, the parent's ``__init__`` may run: TRL's functions that cannot take sharded models are ours."""
        config = self.given.get("args")
        functions: dict[str, Any] = {"global_then_local_main_first": rank0_first}
        if self.parallel_state is not None:
            functions["hash_module"], functions["clone_chat_template"] = hash_shards, take_template
        if self.models.peft_model is not None:
            functions["get_peft_model"] = lambda model, config, **kwargs: self.models.peft_model
        init_kwargs = getattr(config, "model_init_kwargs", None)
        if hasattr(config, "model_init_kwargs"):
            config.model_init_kwargs = None  # used up; TRL would warn that a model object ignores it
        saves_on_sigterm = self.parallel_state is not None and config.enable_jit_checkpoint
        if saves_on_sigterm:
            config.enable_jit_checkpoint = False  # see AgreedStop
        if self.models.is_own_reference:
            self.given.get("model").add_adapter = lambda *args, **kwargs: None  # it is there, made before sharding
        try:
            what = f"setting up {self.trainer_class.__name__}"
            with trainer_functions_replaced(self.trainer_class, **functions), raised_on_every_rank(what, rename=False):
                yield self.given
        finally:
            if hasattr(config, "model_init_kwargs"):
                config.model_init_kwargs = init_kwargs
            if saves_on_sigterm:
                config.enable_jit_checkpoint = True
            if self.models.is_own_reference:
                del self.given.get("model").add_adapter

    def optimizer(self, trainer: Any, make: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """The parent's, over sharded parameters; AdamW of the arguments becomes ours (``optim_implementation``)."""
        given = trainer.optimizer if trainer.optimizer is not None else trainer.optimizer_cls_and_kwargs
        reshard(trainer.model)
        optimizer = make()
        refuse_foreign_parameters(optimizer, trainer.model)
        trainer._routers.give_rates(optimizer, was_given=isinstance(given, torch.optim.Optimizer))
        return in_one_pass(optimizer, self.config.optim_implementation, is_given=given is not None)

    def finish(self, trainer: Any) -> None:
        """Put in the LM head and what watches calls and steps, warm up communicators, say on rank 0 what was done."""
        config, model, report = self.config, trainer.model, self.models.report
        head, notes = self.head.install(trainer), trainer._routers.install()
        if report is not None and head is not None:
            report.notes.append(head)
        if report is not None:
            report.notes += notes
        if self.parallel_state is not None:
            refuse_unsharded(model, report is not None)
            refuse_resizing(model)
            collective_calls.install(trainer)
            trainer.add_callback(trainer._hang)
            reshard(model)  # log-probabilities computed ahead have left the root whole
            grad_norm.warm_up(model)
            if trainer.args.enable_jit_checkpoint:
                trainer.add_callback(AgreedStop(trainer))
        for callback in (trainer._ahead, trainer._finite, trainer._telemetry):  # batches before anyone waits
            trainer.add_callback(callback)
        text = ""
        if config.process_index == 0:
            trainable = [p for p in model.parameters() if p.requires_grad]
            in_bf16 = bool(trainable) and any(p.dtype == torch.bfloat16 for p in trainable)
            lines = [describe_sources(config), report, aux_loss_warning(self.trainer_class, model, config)]
            lines += [*start_lines(model, config, self.topology, report), self.peak.line(model, report)]
            if in_bf16:
                lines.append(bf16_storage_warning(cast(Any, config).learning_rate))
            text = "\n".join(str(line) for line in lines if line)
        with raised_on_every_rank("printing the summary"):  # a closed or full output is met by rank 0 alone
            if text:
                print(text, flush=True)
