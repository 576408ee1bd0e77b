"""``FrozenBase``: with ``save_quantized``, ``save_model`` copies the packed release beside the adapter, as it was."""

from __future__ import annotations

import os
from typing import Any

from hf_fsdpturbo.loading.files import WHERE
from hf_fsdpturbo.loading.release_copy import FOLDER, check_frozen, check_packed, copy_release
from hf_fsdpturbo.lora.adapter import config_of_files
from hf_fsdpturbo.lora.adapter_files import is_adapter
from hf_fsdpturbo.ranks import raised_on_every_rank, rank, together


class FrozenBase:
    """The release that one trainer's adapter belongs to; does nothing without ``save_quantized``.

    Args:
        trainer: read for its model and arguments at the time of each save.
        set_up: whose arguments are looked at, before the model is loaded.

    Raises:
        ValueError: what is trained is no adapter of a packed release; names the field; on every rank.
    """

    def __init__(self, trainer: Any, set_up: Any) -> None:
        self.trainer, self.wanted = trainer, set_up.config.save_quantized
        self._path = ""
        self._where: dict[str, Any] = {}
        self._copied: set[str] = set()
        if not self.wanted:
            return
        with raised_on_every_rank("save_quantized"):
            self._path, self._where = _source(set_up.given, set_up.config)
            if rank() == 0:
                check_packed(self._path, self._where)

    def check(self) -> None:
        """Once the model is there: nothing of the release is trained.

        Raises:
            ValueError: something is; names it. Alike on all ranks.
        """
        if not self.wanted:
            return
        trained = [n for n, p in self.trainer.model.named_parameters() if p.requires_grad and ".lora_" not in n]
        if trained:
            raise ValueError(
                f"save_quantized=True copies the release as it was, but {trained[0]} and {len(trained) - 1} more of "
                "its own parameters are trained. Leave save_quantized out, or train an adapter alone."
            )

    def save(self, output_dir: str | None) -> None:
        """Copy the release into ``output_dir/base``; not into a checkpoint-N. Collective.

        Raises:
            ValueError: as :meth:`check`.
            CheckpointError: on every rank, if it could not be copied.
        """
        saving = self.trainer._saving
        if not self.wanted or saving.staging is not None:
            return
        self.check()
        directory = os.path.abspath(output_dir or self.trainer.args.output_dir)
        with together(f"copying the release to {directory}"):
            if saving.leads and not (directory in self._copied and os.path.isdir(os.path.join(directory, FOLDER))):
                copy_release(self._path, self._where, directory)
                self._copied.add(directory)


def _source(given: Any, config: Any) -> tuple[str, dict[str, Any]]:
    """Path of the release and where its files are, from a trainer's arguments.

    Raises:
        ValueError: it is trained, or another one's weights are; names the field.
    """
    model, adapter = given.get("model"), given.get("peft_config")
    if not isinstance(model, str):
        raise ValueError(
            "save_quantized=True copies the files that model was loaded from, but model is an object. Give its path."
        )
    if adapter is None and is_adapter(model):
        adapter = config_of_files(model)
    if adapter is None:
        raise ValueError(
            "save_quantized=True is for a base that stays as it was, but without an adapter all of it is trained. "
            "Pass peft_config (--use_peft), or leave save_quantized out: what is trained is saved in full."
        )
    check_frozen(getattr(adapter, "modules_to_save", None))
    for field, value in (
        ("dist_config dcp_path", config.fsdpturbo_params.dcp_path),
        ("router_bias_update_rate", config.router_bias_update_rate),
    ):
        if value is not None:
            raise ValueError(
                f"save_quantized=True copies the release as it was, but {field}={value!r} changes its weights. Leave "
                "one of them out."
            )
    kwargs = getattr(config, "model_init_kwargs", None) or {}
    return model, {name: kwargs[name] for name in WHERE if kwargs.get(name)}
