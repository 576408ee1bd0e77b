"""What a run leaves behind, and the trainer that writes it down: the same on ranks and in one plain process.

Note [Why the micro-batches are replayed]. With W ranks and accumulation g, one optimizer step is W*g micro-batches.
The router's aux loss is a statistic of a micro-batch and repeats of an uneven last batch count twice, so another
split of the same samples is another loss (2 to 6 % off). Ranks therefore record what reached ``training_step``; the
reference is the stock trainer in one process, fed those micro-batches with accumulation W*g. That is exact: TRL and
Trainer divide the token loss by the tokens of the whole step over all ranks (then FSDP's mean over ranks cancels their
factor W), and TRL divides the aux loss by g on each of W ranks, which is W*g here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]


@dataclass
class Record:
    """What a run did. Tensors are whole (gathered), on CPU, by parameter name; only rank 0 of a sharded run has them.

    ``load`` and ``entropies`` say what the experts of each layer were given in each step, where a test counts it.
    ``digest`` is a number for each final weight as this rank sees it: replicas that drifted apart differ in it.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    start_weights: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    log_history: list[dict[str, Any]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    trainable: list[str] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)
    with_optimizer_state: list[str] = field(default_factory=list)
    digest: dict[str, float] = field(default_factory=dict)
    load: list[list[Tensor]] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on CPU; a collective if it is a DTensor."""
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.to("cpu", copy=True)


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Whole weights by name; collective."""
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def recording(trainer_class: type) -> type:
    """Subclass of a trainer that fills ``self.record`` and, with ``self.replay`` set, trains on those batches."""
    from transformers import TrainerCallback

    class GradientRecorder(TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record, named = self.trainer.record, list(self.trainer.model.named_parameters())
            record.trainable = [name for name, p in named if p.requires_grad]
            record.without_gradient = [name for name, p in named if p.grad is None]
            record.gradients.append({name: whole(p.grad) for name, p in named if p.grad is not None})

    class Recording(trainer_class):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, record_gradients: bool = True, **kwargs: Any) -> None:
            self.record = Record()
            self.replay: list[Batch] | None = None
            super().__init__(*args, **kwargs)
            if record_gradients:
                self.add_callback(GradientRecorder(self))

        def training_step(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Tensor:
            copied = {k: v.clone().cpu() if isinstance(v, Tensor) else v for k, v in inputs.items()}
            self.record.batches.append(copied)
            return super().training_step(model, inputs, *args, **kwargs)

        def get_train_dataloader(self) -> Any:
            if self.replay is None:
                return super().get_train_dataloader()
            copies = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in b.items()} for b in self.replay]
            batches: Any = copies  # a list will do
            return torch.utils.data.DataLoader(batches, batch_size=None, shuffle=False)

        def finish_record(self) -> Record:
            record = self.record
            record.log_history = list(self.state.log_history)
            record.losses = [log["loss"] for log in record.log_history if "loss" in log]
            record.grad_norms = [float(log["grad_norm"]) for log in record.log_history if "grad_norm" in log]
            record.weights = whole_parameters(self.model)
            record.digest = {n: float((w.double() * w.double().cos()).sum()) for n, w in record.weights.items()}
            state = self.optimizer.state if self.optimizer is not None else {}
            record.with_optimizer_state = [n for n, p in self.model.named_parameters() if state.get(p)]
            return record

    Recording.__name__ = f"Recording{trainer_class.__name__}"
    return Recording


def merge_batches(records: list[Record]) -> list[Batch]:
    """Micro-batches of all ranks in the order of a step: micro-batch by micro-batch, rank by rank.

    Args:
        records: one per *data* rank (ranks that share a batch only once), in rank order.
    """
    lengths = {len(record.batches) for record in records}
    if len(lengths) != 1:
        raise AssertionError(f"Ranks saw different numbers of micro-batches: {lengths}.")
    return [batch for together in zip(*(record.batches for record in records), strict=True) for batch in together]
