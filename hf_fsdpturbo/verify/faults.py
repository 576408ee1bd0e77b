"""Faults to put in on purpose (``--inject``): each must turn the row red that it belongs to."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdpturbo.verify.small_model import SmallModel

if TYPE_CHECKING:  # the names of faults are asked for before anything heavy is imported
    from torch import Tensor


@dataclass(frozen=True)
class Fault:
    """What is broken, in which run, and the row that must show it; later rows may follow from it."""

    row: str
    run: str
    text: str
    break_: Callable[[Any], None] | None = None  # given the trainer of a rank before it trains


def _base(trainer: Any) -> Any:
    model = trainer.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _experts(trainer: Any) -> list[Any]:
    from hf_fsdpturbo.model_spec import find_experts

    return list(find_experts(_base(trainer), 1).values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _wrap_clip(trainer: Any, before: Callable[[], None], after: Callable[[Any], Any]) -> None:
    clip = trainer._clip_grad_norm

    def clipped(model: Any) -> Any:
        before()
        return after(clip(model))

    trainer._clip_grad_norm = clipped


def _double_expert_gradients(trainer: Any) -> None:
    def double() -> None:
        for module in _experts(trainer):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    _local(parameter.grad).mul_(2.0)

    _wrap_clip(trainer, double, lambda norm: norm)


def _swap_experts(trainer: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in _experts(trainer)[0].parameters():
            local = _local(parameter)
            if local.ndim == 3 and local.shape[0] > 1:
                local[:2] = local[:2].flip(0)


def _drop_token(trainer: Any) -> None:
    def drop(module: Any, args: Any, output: Any) -> Any:
        kept = output.new_ones(output.shape[:-1])
        kept.view(-1)[0] = 0.0
        return output * kept.unsqueeze(-1)

    _experts(trainer)[0].register_forward_hook(drop)


def _count_norm_twice(trainer: Any) -> None:
    def twice(norm: Any) -> Any:
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                _local(parameter.grad).mul_(2.0**-0.5)  # what clipping by such a norm leaves
        return norm * 2.0**0.5

    _wrap_clip(trainer, lambda: None, twice)


def _lose_aux_loss(trainer: Any) -> None:
    config = _base(trainer).config.get_text_config()
    config.router_aux_loss_coef = trainer.router_aux_loss_coef = 0.0
    for module in _base(trainer).modules():
        if hasattr(module, "router_aux_loss_coef"):
            module.router_aux_loss_coef = 0.0


def _recompute_otherwise(trainer: Any) -> None:
    calls = [0]
    step = trainer.training_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] = 0
        return step(*args, **kwargs)

    def second(module: Any, args: tuple[Any, ...]) -> Any:
        calls[0] += 1
        return (args[0] * 1.01, *args[1:]) if calls[0] > 1 else None

    trainer.training_step = counted
    _experts(trainer)[0].register_forward_pre_hook(second)


def _leak_documents(trainer: Any) -> None:
    import torch

    loss = trainer.compute_loss

    def leaking(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        whole = {k: v for k, v in inputs.items() if k not in ("position_ids", "seq_lengths")}
        length = inputs["input_ids"].shape[-1]
        places = torch.arange(length, device=inputs["input_ids"].device).expand(inputs["input_ids"].shape)
        return loss(model, {**whole, "position_ids": places}, *args, **kwargs)

    trainer.compute_loss = leaking


def _lose_moments(trainer: Any) -> None:
    from transformers import TrainerCallback

    class Forget(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for values in trainer.optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    if name in values:
                        _local(values[name]).zero_()

    trainer.add_callback(Forget())


def _die(trainer: Any) -> None:
    from hf_fsdpturbo import ranks

    if ranks.rank() == ranks.world_size() - 1:
        trainer.training_step = lambda *args, **kwargs: os._exit(3)


def exchange_in_file(saved: str) -> None:
    """Two experts of the first layer exchange their weights in the saved files.

    Raises:
        ValueError: there is no file with two experts.
    """
    from safetensors.torch import load_file, save_file

    for file in sorted(Path(saved).glob("*.safetensors")):
        tensors = load_file(str(file))
        for name in sorted(tensors):
            if ".experts." not in name:
                continue
            other = name.replace(".experts.0.", ".experts.1.")
            if other != name and other in tensors:
                tensors[name], tensors[other] = tensors[other], tensors[name]
            elif tensors[name].ndim == 3 or (".lora_" in name and tensors[name].ndim == 2):
                tensors[name] = tensors[name].flip(0).contiguous()
            else:
                continue
            save_file(tensors, str(file), metadata={"format": "pt"})
            return
    raise ValueError(f"the fault exported_swapped finds no two experts in {saved}")


FAULTS: dict[str, Fault] = {
    "expert_gradients_doubled": Fault("gradients", "train", "nobody divides by ep", _double_expert_gradients),
    "experts_swapped": Fault("loaded", "train", "two experts of a rank change places after loading", _swap_experts),
    "token_dropped": Fault("gradients", "train", "the experts of one layer forget a token", _drop_token),
    "norm_counted_twice": Fault("norm", "train", "replicas count as shards", _count_norm_twice),
    "aux_loss_lost": Fault("loss", "train", "the router's loss is not added", _lose_aux_loss),
    "recompute_differs": Fault("recompute", "recompute", "the second forward sees other tokens", _recompute_otherwise),
    "documents_leak": Fault("packing", "packing", "packed documents see each other", _leak_documents),
    "export_swapped": Fault("saved file", "train", "two experts change places in the file"),
    "moments_lost": Fault("resume", "resume", "the optimizer begins anew", _lose_moments),
    "rank_dies": Fault("loss", "train", "the last rank ends in its first step", _die),
}


def check_fault(name: str, small: SmallModel, training: Mapping[str, Any], runs: Collection[str]) -> None:
    """Raise ValueError where a fault has nothing to act on in this model, with these arguments of TRL's and runs."""
    if FAULTS[name].run not in runs:
        raise ValueError(f"--inject {name}: there is no {FAULTS[name].run} run here. Choose another fault.")
    lost = not small.has_aux_loss or training.get("router_aux_loss_coef") == 0
    if name == "aux_loss_lost" and lost:
        raise ValueError(f"--inject {name}: {small.architecture} has no router loss to lose. Choose another fault.")


def put_in(name: str | None, run: str, trainer: Any) -> None:
    """Break a rank's trainer before it trains, where ``name`` belongs to this run."""
    fault = FAULTS[name] if name is not None else None
    if fault is not None and fault.run == run and fault.break_ is not None:
        fault.break_(trainer)


def after_save(name: str | None) -> Callable[[str], None]:
    """What a fault does to a saved folder; nothing for others."""
    return exchange_in_file if name == "export_swapped" else lambda saved: None
