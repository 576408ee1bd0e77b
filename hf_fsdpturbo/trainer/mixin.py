"""The trainer mixin: thin hooks that hand the model to the expert-mesh pipeline and leave the loop as it is.

    class MyTrainer(FSDPTurboTrainerMixin, transformers.Trainer): ...

The mixin stands first in the bases. It shards the model before the parent's ``__init__`` sees it; the parent then
finds a model that accelerate takes for prepared, and runs unchanged.
"""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, set_seed
from transformers.trainer_utils import enable_full_determinism

from hf_fsdpturbo import compat, grad_norm
from hf_fsdpturbo.arguments import FSDPTurboArguments, bf16_storage_warning, describe_sources, sizes_for_world
from hf_fsdpturbo.lora.adapter_files import is_peft
from hf_fsdpturbo.lora.merged_export import export_merged
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState, Topology
from hf_fsdpturbo.parallelize.build import build_model, shard_given_model
from hf_fsdpturbo.parallelize.order import ShardingReport
from hf_fsdpturbo.parallelize.reload import reload_weights
from hf_fsdpturbo.sharding.outer_fsdp import reshard
from hf_fsdpturbo.trainer.batches import ContextParallelHooks
from hf_fsdpturbo.trainer.evaluation import EvaluateOnce
from hf_fsdpturbo.trainer.given_arguments import GivenArguments
from hf_fsdpturbo.trainer.reference import add_reference, hash_shards, trainer_functions_replaced
from hf_fsdpturbo.trainer.refusals import (
    aux_loss_warning,
    refuse_images,
    refuse_model,
    refuse_optimizers,
    refuse_unsharded,
)
from hf_fsdpturbo.trainer.saving import CheckpointHooks


class FSDPTurboTrainerMixin(CheckpointHooks, ContextParallelHooks):
    """Expert parallelism for any Transformers trainer; put it before the trainer in the bases.

    ``model`` may be a path or a model object; ``args`` must extend ``FSDPTurboArguments``.

    Attributes:
        parallel_state: the meshes, None in a run of one process.
        sharding_report: what was sharded, and by which kernels it runs.
        last_group_norms: gradient norm of each kind of parameter (``dense``, ``expert``) and in ``total`` at the last
            step; float32 scalars.
    """

    parallel_state: FSDPTurboParallelState | None = None
    sharding_report: ShardingReport | None = None
    last_group_norms: dict[str, Tensor] | None = None
    _gradient_groups: list[grad_norm.ParameterGroup] | None = None
    _peft_model: nn.Module | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        behind = type(self).__mro__[type(self).__mro__.index(FSDPTurboTrainerMixin) + 1 :]
        given = GivenArguments(super().__init__, behind, args, kwargs)
        config = given.get("args")
        if not isinstance(config, FSDPTurboArguments):
            raise ValueError(
                f"args must extend FSDPTurboArguments, but it is {type(config).__name__}. Use "
                "FSDPTurboTrainingArguments, FSDPTurboSFTConfig, FSDPTurboDPOConfig or FSDPTurboRewardConfig."
            )
        refuse_model(given)
        refuse_optimizers(given, config.world_size)
        seed = cast(Any, config).seed
        enable_full_determinism(seed) if cast(Any, config).full_determinism else set_seed(seed)
        self._set_up_meshes(config)
        init_kwargs = getattr(config, "model_init_kwargs", None)
        add_reference(type(self), given, config, self.parallel_state)
        self._shard_models(given, config)
        if hasattr(config, "model_init_kwargs"):
            config.model_init_kwargs = None  # used up; TRL would warn that a model object ignores it
        try:
            with trainer_functions_replaced(type(self), **self._trl_functions()):
                super().__init__(*given.args, **given.kwargs)
        finally:
            if hasattr(config, "model_init_kwargs"):
                config.model_init_kwargs = init_kwargs
        self._finish_set_up(config)

    def _set_up_meshes(self, config: FSDPTurboArguments) -> None:
        """Check the sizes on every rank, then build the meshes (runs of two processes or more)."""
        world_size = config.world_size
        topology = Topology.resolve(world_size, **sizes_for_world(config, world_size))
        if world_size == 1:
            return
        sizes = {"cp_size": topology.cp_size, "ep_size": topology.ep_size, "edp_size": topology.edp_size}
        compat.refuse_broken_torch(world_size, dist.get_backend(), **sizes)
        timeout = timedelta(seconds=config.dist_timeout)
        self.parallel_state = FSDPTurboParallelState.initialize(topology, config.device.type, timeout=timeout)

    def _shard_models(self, given: GivenArguments, config: FSDPTurboArguments) -> None:
        """Replace ``model`` in the parent's arguments by the sharded one.

        With ``peft_config`` the parent gets the base model and takes our PEFT model from ``get_peft_model``.
        """
        model, state = given.get("model"), self.parallel_state
        peft_config = None if state is None else given.get("peft_config")
        if isinstance(model, str):
            model, self.sharding_report = build_model(type(self), model, config, state, peft_config=peft_config)
        elif isinstance(model, nn.Module):
            model, self.sharding_report = shard_given_model(model, config, state, peft_config=peft_config)
        if peft_config is not None:
            self._peft_model, model = model, cast(Any, model).get_base_model()
        given["model"] = model

    def _trl_functions(self) -> dict[str, Any]:
        """Functions of TRL that cannot take sharded models, by name, and ours in their place."""
        if self.parallel_state is None:
            return {}
        return {"hash_module": hash_shards, "get_peft_model": lambda model, config, **kwargs: self._peft_model}

    def _finish_set_up(self, config: FSDPTurboArguments) -> None:
        """Warm up communicators and print one summary on rank 0."""
        if self.parallel_state is not None:
            refuse_unsharded(self.model, self.sharding_report is not None)
            reshard(self.model)  # log-probabilities computed ahead have left the root whole
            grad_norm.warm_up(self.model)
        if config.process_index == 0:
            trainable = [p for p in self.model.parameters() if p.requires_grad]
            in_bf16 = bool(trainable) and any(p.dtype == torch.bfloat16 for p in trainable)
            lines = [describe_sources(config), self.sharding_report, bf16_storage_warning(config, in_bf16)]
            lines.append(aux_loss_warning(type(self), self.model, config))
            print("\n".join(str(line) for line in lines if line), flush=True)

    # Hooks of transformers.Trainer. Each is called by the unchanged training loop.

    def create_accelerator_and_postprocess(self) -> None:
        """Tell the data loader who shares a batch: it reads nothing but the axis names of this mesh."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        kind = str(self.accelerator.distributed_type)
        if any(name in kind for name in ("FSDP", "DEEPSPEED", "MEGATRON")):
            raise ValueError(
                f"distributed_type is {kind}, but sharding is done by hf_fsdpturbo. Set distributed_type: MULTI_GPU "
                "(MULTI_NPU on Ascend; MULTI_GPU with use_cpu: true on CPU) in the accelerate config."
            )
        if self.parallel_state is not None:
            self.accelerator.state.device_mesh = self.parallel_state.loader_mesh

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """A sharded model is where it belongs."""
        if self.parallel_state is None:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def save_merged_model(self, output_dir: str) -> None:
        """Write a Hub checkpoint with the adapter merged into the base weights; called by all ranks.

        Raises:
            ValueError: the model has no adapter.
            CheckpointError: on every rank, if one could not write.
        """
        if not is_peft(self.model):
            raise ValueError("save_merged_model: the model has no adapter. Use save_model.")
        export_merged(self.model, output_dir, self.hub_file_bytes, cast(Any, self).processing_class)

    def _load_hub_weights(self, directory: str) -> None:
        reload_weights(self.model, directory, self.args, self.parallel_state)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Optimizer over sharded parameters."""
        self._gradient_groups = None
        reshard(self.model)
        return super().create_optimizer() if model is None else super().create_optimizer(model)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train with everything that exists now kept out of Python's garbage collection.

        A full collection walks millions of objects and stops one rank while the others wait for it in a collective.
        """
        gc.collect()
        gc.freeze()
        try:
            return super().train(*args, **kwargs)
        finally:
            gc.unfreeze()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Refuse image batches: a rank without images would not join the others in its vision tower."""
        refuse_images(inputs, self.parallel_state)
        return super()._prepare_inputs(inputs)  # type: ignore[misc]

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        if self.parallel_state is None:
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        return self._norm_and_clip(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self.parallel_state is None or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        return self._norm_and_clip(model, float("inf"))

    def _norm_and_clip(self, model: nn.Module, max_norm: float) -> Tensor:
        if self._gradient_groups is None:  # as static as the optimizer's own list of parameters
            self._gradient_groups = grad_norm.parameter_groups(model)
        grad_norm.average_replicated_gradients_(self._gradient_groups)
        self.last_group_norms = grad_norm.clip_groups_(self._gradient_groups, max_norm)
        return self.last_group_norms["total"]

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: each trial would build a new model past the sharded loader."""
        raise ValueError(
            "hyperparameter_search rebuilds the model for each trial and is not supported. Start one run a trial."
        )


class FSDPTurboTrainer(EvaluateOnce, FSDPTurboTrainerMixin, Trainer):
    """``transformers.Trainer`` with the expert-mesh pipeline; ``model`` may also be a path (loaded as a causal LM)."""
