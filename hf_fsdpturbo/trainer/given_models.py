"""``GivenModels``: the models that a trainer was given, replaced in its arguments by sharded ones."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import AutoProcessor

from hf_fsdpturbo.arguments import FSDPTurboArguments
from hf_fsdpturbo.loading.files import base_of_adapter, refuse_trusted_base
from hf_fsdpturbo.lora.adapter import config_of_files, fill_reference
from hf_fsdpturbo.lora.adapter_files import ADAPTER_CONFIG, is_adapter, is_peft, load_adapter
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.parallelize.build import build_model, shard_given_model
from hf_fsdpturbo.parallelize.order import ShardingReport
from hf_fsdpturbo.parallelize.trainer_family import trl_classes, trusts_code
from hf_fsdpturbo.ranks import together
from hf_fsdpturbo.trainer.chat_template import refuse_new_tokens
from hf_fsdpturbo.trainer.given_arguments import GivenArguments
from hf_fsdpturbo.trainer.head_choice import HeadChoice
from hf_fsdpturbo.trainer.reference import add_reference, is_own_reference
from hf_fsdpturbo.trainer.refusals import frozen_in_four_bits, is_transformers_model
from hf_fsdpturbo.trainer.rows import refuse_pictures, some_rank_may_have_images


class GivenModels:
    """Policy, reference and adapter of one trainer: paths and objects in its arguments, sharded before its parent.

    Args:
        trainer_class: the user's.
        given: its arguments; models in them are replaced.
        config: the training arguments in force.
        state: the meshes, None in a run of one process.
        head: the LM head that the trainer will run.

    Attributes:
        peft_model: ours, where the parent gets only its base model.
        is_own_reference: whether the reference is an adapter of the model itself.
        report: what was done to ``model``; None where none was given, or not yet.
    """

    def __init__(
        self,
        trainer_class: type,
        given: GivenArguments,
        config: FSDPTurboArguments,
        state: FSDPTurboParallelState | None,
        head: HeadChoice,
    ) -> None:
        self.trainer_class, self.given, self.config, self.state, self.head = trainer_class, given, config, state, head
        self.peft_model: nn.Module | None = None
        self.is_own_reference = False
        self.report: ShardingReport | None = None

    def shard(self) -> ShardingReport | None:
        """Replace ``ref_model`` and ``model`` in the parent's arguments by sharded ones.

        With ``peft_config`` the parent gets the base model and takes our PEFT model from ``get_peft_model``.

        Returns:
            what was done to ``model``; None where none was given.
        """
        given, config, state = self.given, self.config, self.state
        if state is not None:
            refuse_new_tokens(given, config)
        refuse_pictures(self.trainer_class, given)
        with_images = state is not None and some_rank_may_have_images(given)
        add_reference(self.trainer_class, given, config, state, with_images=with_images)
        model = given.get("model")
        packed = frozen_in_four_bits(given, config)
        peft_config = given.get("peft_config") if state is not None or packed or isinstance(model, str) else None
        self.is_own_reference = state is not None and is_own_reference(given)
        if state is not None and is_adapter(model):
            given["model"] = self._load_adapter(model, with_images)
            self._used_up()
            return self.report
        more: dict[str, Any] = {"peft_config": peft_config, "head_unit": self.head.is_ours}
        more["with_images"] = with_images
        more["quantization_config"] = given.get("quantization_config")
        if isinstance(model, str):
            self._keep_revision(model)
            model, self.report = build_model(self.trainer_class, model, config, state, **more)
        elif is_transformers_model(model):
            model, self.report = shard_given_model(model, config, state, with_reference=self.is_own_reference, **more)
        if peft_config is not None and is_peft(model):
            self.peft_model, model = model, cast(Any, model).get_base_model()
        given["model"] = model
        self._used_up()
        return self.report

    def _used_up(self) -> None:
        """Take the trainer's ``quantization_config``: with a model object, TRL would warn or refuse."""
        if self.given.get("quantization_config") is not None:
            self.given["quantization_config"] = None

    def prepare_made(self, model: nn.Module) -> nn.Module:
        """What ``model_init`` has made, in one process: as a model object that was given."""
        if is_transformers_model(model):
            model, self.report = shard_given_model(model, self.config, None)
        return model

    def _load_adapter(self, directory: str, with_images: bool = False) -> nn.Module:
        """The base that an adapter's files name, sharded while it loads, and the adapter filled from them.

        Raises:
            ValueError: there is a second adapter; the files name no base or do not fit; on every rank.
        """
        with together(f"reading {directory}"):
            if self.given.get("peft_config") is not None:
                raise ValueError(
                    f"model is an adapter ({directory}), and peft_config would add another one. Leave peft_config "
                    "out, or merge the adapter first (merge_and_unload)."
                )
            base_of_adapter(directory)  # looks at the file before PEFT reads it
            peft_config = config_of_files(directory)
            base = peft_config.base_model_name_or_path
            if not base:
                raise ValueError(f"{directory}/{ADAPTER_CONFIG} has no base_model_name_or_path. Add it.")
            refuse_trusted_base(directory, trusts_code(self.config), base)
        model, self.report = build_model(
            self.trainer_class,
            base,
            self.config,
            self.state,
            peft_config=peft_config,
            with_images=with_images,
            with_reference=self.is_own_reference,
            quantization_config=self.given.get("quantization_config"),
        )
        with together(f"reading {directory}"):
            load_adapter(model, directory)
        if self.is_own_reference:
            fill_reference(model)
        return model

    def _keep_revision(self, path: str) -> None:
        """Load the tokenizer as TRL would: given a model object, it forgets the revision of the weights."""
        kwargs = getattr(self.config, "model_init_kwargs", None) or {}
        revision = kwargs.get("revision")
        if revision and trl_classes(self.trainer_class) and self.given.get("processing_class") is None:
            trust = getattr(self.config, "trust_remote_code", False)
            self.given["processing_class"] = AutoProcessor.from_pretrained(
                path, revision=revision, trust_remote_code=trust
            )
