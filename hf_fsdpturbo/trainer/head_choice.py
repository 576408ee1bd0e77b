"""Which fused LM head a trainer runs: ours where its loss weighs all positions alike, or TRL's, and why."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule

from hf_fsdpturbo.lm_head import install_fused_head
from hf_fsdpturbo.parallelize.trainer_family import trl_classes
from hf_fsdpturbo.trainer.given_arguments import GivenArguments


class HeadChoice:
    """The choice of one trainer, made before its model is sharded: as an FSDP unit, the head must be ours.

    Args:
        trainer_class: the user's.
        given: the trainer's arguments.
        args: the training arguments in force.

    Attributes:
        why_not: why TRL's head stays, None for ours.
        is_ours: whether ours will run.

    Raises:
        ValueError: ``fused_linear_cross_entropy='on'``, where it cannot be.
    """

    def __init__(self, trainer_class: type, given: GivenArguments, args: Any) -> None:
        self.asked, self.family = args.fused_linear_cross_entropy, trl_classes(trainer_class)
        self.is_quiet = self.asked == "off" or (self.asked == "auto" and args.device.type == "cpu")
        self.why_not = "" if self.is_quiet else self._reason(trainer_class, given, args)
        if self.asked == "on" and self.why_not is not None:
            raise self._cannot_be(self.why_not)

    @property
    def is_ours(self) -> bool:
        return self.why_not is None

    def _reason(self, trainer_class: type, given: GivenArguments, args: Any) -> str | None:
        if "SFTTrainer" not in self.family:
            return "only SFTTrainer's loss weighs all positions alike"
        for cls in trainer_class.__mro__[: trainer_class.__mro__.index(self.family["SFTTrainer"])]:
            if not cls.__module__.startswith("hf_fsdpturbo.") and "compute_loss" in vars(cls):  # ours hands on
                return f"{cls.__name__}.compute_loss may weigh positions differently"
        if (kind := getattr(args, "loss_type", "nll")) != "nll":  # plain TrainingArguments have none
            return f"loss_type={kind!r} weighs positions differently"
        if given.get("compute_loss_func") is not None:
            return "compute_loss_func takes whole logits"
        if args.label_smoothing_factor:
            return f"label_smoothing_factor={args.label_smoothing_factor} takes whole logits"
        return "torch_compile traces TRL's" if args.torch_compile else None

    def _cannot_be(self, why: str) -> ValueError:
        return ValueError(
            f"fused_linear_cross_entropy={self.asked!r} cannot be: {why}. Set fused_linear_cross_entropy='off'."
        )

    def install(self, trainer: Any) -> str | None:
        """Put our head into the model of the built trainer, if it was chosen.

        Returns:
            a line for the summary; None where there was nothing to choose.

        Raises:
            ValueError: the model has no fused head that we know, while ours was counted on.
        """
        if self.is_quiet or "SFTTrainer" not in self.family:
            return None
        if self.why_not is not None:
            return f"LM head: TRL's ({self.why_not})"
        model = trainer.model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapper
        if not install_fused_head(base):
            raise self._cannot_be(f"{type(base).__name__} has no fused LM head of a kind that is known")
        alone = isinstance(base.get_output_embeddings(), FSDPModule)
        return f"LM head: gradients in its forward{', an FSDP unit' if alone else ''}"
