"""The trainer mixin: every override of Transformers' trainers, each handing on at once to an object it owns.

    class MyTrainer(FSDPTurboTrainerMixin, transformers.Trainer): ...

The mixin stands first in the bases. It shards the model before the parent's ``__init__`` sees it; the parent then
finds a model that accelerate takes for prepared, and runs unchanged.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_fsdpturbo.context_parallel.sharded_head import install_sharded_head
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.parallelize.order import ShardingReport
from hf_fsdpturbo.ranks import raised_on_every_rank, together
from hf_fsdpturbo.telemetry.metrics import Telemetry
from hf_fsdpturbo.trainer import refusals, resumed_from, resuming, saving
from hf_fsdpturbo.trainer.batches import SharedBatches
from hf_fsdpturbo.trainer.batches_ahead import BatchesAhead
from hf_fsdpturbo.trainer.evaluation import GatheredRows
from hf_fsdpturbo.trainer.frozen_base import FrozenBase
from hf_fsdpturbo.trainer.given_arguments import GivenArguments
from hf_fsdpturbo.trainer.hang_watch import HangWatch
from hf_fsdpturbo.trainer.loss_scale import LossScale
from hf_fsdpturbo.trainer.nonfinite import NonFinite
from hf_fsdpturbo.trainer.router_training import RouterTraining
from hf_fsdpturbo.trainer.rows import checked_batches
from hf_fsdpturbo.trainer.set_up import SetUp
from hf_fsdpturbo.trainer.step_norm import StepNorm
from hf_fsdpturbo.trainer.training import training


class FSDPTurboTrainerMixin:
    """Expert parallelism for any Transformers trainer; put it before the trainer in the bases.

    ``model`` may be a path or a model object; ``args`` must extend ``FSDPTurboArguments``.

    Attributes:
        parallel_state: the meshes, None in a run of one process.
        sharding_report: what was sharded, and by which kernels it runs.
        last_group_norms: gradient norm of each kind of parameter (``dense``, ``expert``) and in ``total`` at the last
            step; float32 scalars.
        async_save: set on the class or the trainer: write checkpoints in the background; one appears when it is whole.
            Needs host memory for one copy of this rank's model and optimizer shards.
        hub_file_bytes: set on the class or the trainer: size at which a Hub export begins a new file.
        cp_sharded_loss: set on the class or the trainer, SFT only: run the LM head on each rank's slice instead of
            whole on every cp rank; same losses, metrics and gradients (see ``sharded_head.py``).
        scalars_are_means: set on the class: all scalars the trainer gathers while it evaluates are means over samples.
    """

    parallel_state: FSDPTurboParallelState | None = None
    sharding_report: ShardingReport | None = None
    last_group_norms: dict[str, Tensor] | None = None
    async_save: bool = False
    hub_file_bytes: int = 5 * 10**9
    cp_sharded_loss: bool = False
    scalars_are_means: bool = False

    _rows: GatheredRows | None = None  # None in a run of one process

    # What the trainer behind us brings.
    model: Any
    args: Any
    state: Any
    accelerator: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        behind = type(self).__mro__[type(self).__mro__.index(FSDPTurboTrainerMixin) + 1 :]
        set_up = SetUp(type(self), GivenArguments(super().__init__, behind, args, kwargs))
        self.parallel_state = set_up.parallel_state
        cp_size, dp_size = set_up.topology.cp_size, set_up.topology.dp_size
        self._batches, self._scale = SharedBatches(cp_size, dp_size), LossScale(self, dp_size)
        self._saving, self._norm = saving.Saving(self, set_up.config), StepNorm(self)
        self._frozen_base = FrozenBase(self, set_up)
        self._finite, self._set_up = NonFinite(self, set_up.config.on_nonfinite), set_up
        self._telemetry = Telemetry(self, set_up.config.fsdpturbo_metrics)
        self._ahead = BatchesAhead(self, set_up.config.device.type != "cpu")
        self._hang, self._routers = HangWatch(set_up.config), RouterTraining(self, set_up.config)
        self._opened: Any = None  # shards of the checkpoint that is being resumed
        self.sharding_report = set_up.models.shard()
        with set_up.parent_arguments() as given:
            super().__init__(*given.args, **given.kwargs)
        set_up.finish(self)

    # Set-up, called by the parent's __init__

    def create_accelerator_and_postprocess(self) -> None:
        """Tell the data loader who shares a batch: it reads nothing but the axis names of this mesh."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        refusals.refuse_accelerate(self.accelerator)
        self._batches.copy_beside(self.accelerator, self.args)
        if self.parallel_state is not None:
            self._batches.read_on_every_rank(self.accelerator, self.parallel_state.loader_mesh)
            self._rows = GatheredRows(self.accelerator, self._batches.cp_size)
            self._rows.install()
            self._rows.bind(self)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Rank 0 asks the Hub; what goes wrong there is raised on every rank."""
        with raised_on_every_rank("making the Hub repository (push_to_hub)"):
            super().init_hf_repo(token, private)  # type: ignore[misc]

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """One process only: what ``model_init`` makes gets what a model that is given gets."""
        made = self._set_up.models.prepare_made(super().call_model_init(trial))  # type: ignore[misc]
        self.sharding_report = self._set_up.models.report
        return made

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """A sharded model is where it belongs."""
        if self.parallel_state is None:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self._norm.forget()
        parents, given = super().create_optimizer, () if model is None else (model,)  # type: ignore[misc]
        self.optimizer = self._set_up.optimizer(self, lambda: parents(*given))
        return self.optimizer

    # Batches

    def get_tp_size(self) -> int:
        """Ranks that hold the same batch and the same loss: divides token counts, loss scale, total batch size."""
        size = self._scale.ranks_of_one_loss() or self._batches.cp_size
        return size if size > 1 else super().get_tp_size()  # type: ignore[misc]

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> DataLoader:
        dataset = self._batches.stream(dataset, self.args.accelerator_config.dispatch_batches)
        evaluates = self._rows is not None and not kwargs.get("is_training")
        with checked_batches(self, dataset, counts_images=evaluates) as checked:
            return super()._get_dataloader(checked, *args, **kwargs)  # type: ignore[misc]

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        items = super()._get_num_items_in_batch(*args, **kwargs)  # type: ignore[misc]
        return self._batches.items(items, self.args.average_tokens_across_devices, self._rows)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """A step's batches, some fetched ahead; telemetry times how long they take to come."""
        batches = self._ahead.of_step(epoch_iterator, self._telemetry.batches(epoch_iterator))
        return super().get_batch_samples(batches, *args, **kwargs)  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        self._finite.log.added()
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        self.state.num_input_tokens_seen = self._batches.tokens_seen(before, self.state.num_input_tokens_seen)

    def _prepare_inputs(self, inputs: Any) -> Any:
        refusals.refuse_images(inputs, self.sharding_report)
        return super()._prepare_inputs(inputs)  # type: ignore[misc]

    # Steps

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the parent's; see :func:`hf_fsdpturbo.trainer.training.training` for what it resumes from and raises."""
        with training(self, resume_from_checkpoint) as checkpoint:
            return super().train(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a micro-batch, as the log shall have it."""
        return self._finite.saw_loss(super().training_step(*args, **kwargs))  # type: ignore[misc]

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Cuts the LM head at the first loss, if asked for: TRL makes its fused head in ``__init__``, after us.

        In evaluations a loss over tokens weighs those of all ranks alike, as one process does: TRL asks for none.
        """
        if self.cp_sharded_loss:
            install_sharded_head(self.model)
        if num_items_in_batch is None and self._rows is not None and self._rows.evaluating:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        loss: Any = functools.partial(super().compute_loss, model, inputs, return_outputs)  # type: ignore[misc]
        return self._scale.compute(loss, inputs, num_items_in_batch)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        clip = functools.partial(self._norm.clip, max_norm=self.args.max_grad_norm)
        return self._finite.saw_norm((clip if self._norm.is_ours else super()._clip_grad_norm)(model))  # type: ignore[misc]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if not self._norm.is_ours or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        return self._finite.saw_norm(self._norm.clip(model, float("inf")))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """With what was measured since the last line, in a training step's line."""
        super().log(self._telemetry.extend(logs, start_time), start_time)  # type: ignore[misc]

    # Evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Each sample counts once, also where repeats fill an uneven last batch."""
        with contextlib.nullcontext() if self._rows is None else self._rows.evaluation(self):
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Where a batch mixes real samples and repeats, only real ones are computed: their mean is the loss."""
        step = super().prediction_step  # type: ignore[misc]
        if self._rows is None:
            return step(model, inputs, prediction_loss_only, ignore_keys)
        return self._rows.step(inputs, lambda x: step(model, x, prediction_loss_only, ignore_keys))

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As :meth:`Saving.save_model`; called by all ranks."""
        if self._saving.left_to_parent:
            super().save_model(output_dir, _internal_call=True)  # type: ignore[misc]
        else:
            self._saving.save_model(output_dir)
        self._frozen_base.save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def save_merged_model(self, output_dir: str) -> None:
        """As :meth:`Saving.save_merged_model`; called by all ranks."""
        self._saving.save_merged_model(output_dir)

    def _get_output_dir(self, trial: Any) -> str:
        """While a checkpoint is being saved, the parent class writes into staging."""
        return self._saving.staging or super()._get_output_dir(trial)  # type: ignore[misc]

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        save = super()._save_checkpoint  # type: ignore[misc]
        with self._hang.paused():
            self._saving.save_checkpoint(lambda: save(model, trial), self._get_output_dir(trial))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._saving.as_plain:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        else:
            self._saving.save_training_state(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        with together(f"saving to {output_dir}"):
            super()._save_scaler(output_dir)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        with together(f"saving to {output_dir}"):
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """The parent calls this while the checkpoint is still in staging: wait for its final name."""
        if self._saving.staging is None:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    # Resuming

    def load_adapter(self, directory: str) -> None:
        """As :func:`hf_fsdpturbo.trainer.resuming.load_adapter`; called by all ranks, before ``train()``."""
        resuming.load_adapter(self.model, directory)

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        return resuming.place_in_stream(self, args[3], super()._init_training_state(*args))  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        parents = super()._load_from_checkpoint  # type: ignore[misc]
        self._opened = resuming.load_model(self, resume_from_checkpoint, parents)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            opened, self._opened = self._opened, None
            parents = super()._load_optimizer_and_scheduler  # type: ignore[misc]
            resuming.load_training_state(self, checkpoint, opened, parents)

    def _load_scaler(self, checkpoint: str | None) -> None:
        resumed_from.refuse_stray_scaler(checkpoint, self.accelerator)
        super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Each rank reads a file of its own."""
        if checkpoint is not None:
            with together(f"reading the random state in {checkpoint}"):
                super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        self._saving.finish()
        resuming.load_best_model(self, super()._load_best_model)  # type: ignore[misc]

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        refusals.refuse_search(self.parallel_state)
        return super().hyperparameter_search(*args, **kwargs)  # type: ignore[misc]


class FSDPTurboTrainer(FSDPTurboTrainerMixin, Trainer):
    """``transformers.Trainer`` with the expert-mesh pipeline; ``model`` may also be a path (loaded as a causal LM)."""
