"""``hf-fsdpturbo export CHECKPOINT OUT``: a Hub checkpoint from a sharded one, on one machine, without a GPU.

The model is built on meta, for its names only; one tensor after another is read from the shards and written.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

import torch
from torch import Tensor

from hf_fsdpturbo.bounded import cut
from hf_fsdpturbo.checkpoint import commit, dcp, facts, hub, intact, unused
from hf_fsdpturbo.checkpoint.dcp_read import SavedDirectory
from hf_fsdpturbo.checkpoint.inside import check_checkpoint_links
from hf_fsdpturbo.lora.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE, from_shards

_OURS = re.compile(
    r"dcp|optimizer\.json|topology\.json|COMPLETE\.json|scheduler\.pt|scaler\.pt|rng_state.*\.pth|trainer_state\.json"
    r"|training_args\.bin|(model.*|unused|adapter_model)\.safetensors(\.index\.json)?"
)


class DcpTensors:
    """Tensors of a DCP directory for :func:`hub.export_tensors`; those of one conversion are kept while it runs.

    Args:
        opened: DCP directory.
        tensors: meta tensors by name in the model.
    """

    def __init__(self, opened: SavedDirectory, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.opened = tensors, opened
        self.held: dict[str, Tensor] = {}

    def begin(self, names: tuple[str, ...]) -> None:
        """Keep no other tensors than these."""
        self.held = {name: tensor for name, tensor in self.held.items() if name in names}

    def rows(self, name: str, start: int, stop: int, writer: int) -> Tensor | None:
        """Rows ``[start, stop)`` on the CPU."""
        if name not in self.held:
            meta = self.tensors[name]
            whole = torch.empty(meta.shape, dtype=meta.dtype)
            self.opened.read_into({f"model.{name}": whole})
            self.held[name] = whole
        return self.held[name][start:stop] if self.held[name].ndim else self.held[name]

    def owner_of_rows(self, name: str, start: int, stop: int) -> list[int]:
        """The one process there is."""
        return [0]

    def sharers_of_rows(self, name: str, start: int, stop: int) -> list[int]:
        """The one process there is."""
        return [0]


def _model_class(name: str, config: Any, trust_remote_code: bool) -> Any:
    import transformers

    if trust_remote_code and getattr(config, "auto_map", None):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(
            f"topology.json names the model class {cut(name)}, which transformers {transformers.__version__} lacks. "
            "Use the release that trained it, or --trust-remote-code for a model with its own code."
        )
    return found


def skeleton(checkpoint: str, trust_remote_code: bool) -> Any:
    """The checkpoint's model on meta, with the names its weights came with."""
    from transformers import AutoConfig
    from transformers.conversion_mapping import get_model_conversion_mapping

    described = facts.read(checkpoint)
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    build = _model_class(described["model_class"], config, trust_remote_code)
    with torch.device("meta"):
        model = build.from_config(config) if hasattr(build, "from_config") else build(config)
    if described["hub_conversions"] is not None:
        known = get_model_conversion_mapping(model)
        kept = [c for c in known if facts.conversion_key(c) in described["hub_conversions"]]
        if len(kept) != len(described["hub_conversions"]):
            raise ValueError(
                f"{checkpoint} was trained from weights whose names this transformers release cannot make: "
                f"{described['hub_conversions']}. Use transformers {described['versions']['transformers']}."
            )
        model._weight_conversions = kept
    return model


def export_checkpoint(checkpoint: str, out: str, max_file_bytes: int, trust_remote_code: bool = False) -> list[str]:
    """Write ``out`` from a finished ``checkpoint-N``; names of the weight files.

    Raises:
        ValueError: not a finished checkpoint, no shards in it, ``out`` not empty, or a class that is not known.
    """
    directory = _shards_of(checkpoint)
    if is_of_adapter(checkpoint):
        raise ValueError(f"CHECKPOINT {checkpoint} is of an adapter, whose weights are no model's.")
    if os.path.isdir(out) and os.listdir(out):
        raise ValueError(f"{out} is not empty. Choose a new directory.")
    model = skeleton(checkpoint, trust_remote_code)
    unused.adopt(model, checkpoint)
    opened = SavedDirectory(directory)
    saved = dcp.saved_tensors(opened, "model.")
    wanted = hub.saved_tensors(model)
    dcp.check_fit(directory, {name: saved[name] for name in wanted if name in saved}, wanted, same_dtype=False)
    tensors = {name: torch.empty(saved[name].size, dtype=saved[name].dtype, device="meta") for name in wanted}
    _copy_beside(checkpoint, out)
    return hub.export_tensors(model, DcpTensors(opened, tensors), out, max_file_bytes)


def is_of_adapter(checkpoint: str) -> bool:
    """Whether a checkpoint is of a PEFT model."""
    return os.path.isfile(os.path.join(checkpoint, ADAPTER_CONFIG))


def export_adapter(checkpoint: str, out: str) -> list[str]:
    """Write plain PEFT's files from the shards of a LoRA run's ``checkpoint-N``; names of the weight files.

    The shards are what a resume reads, with checksums; the adapter file beside them is not read.

    Raises:
        ValueError: not a finished checkpoint, or no shards in it.
    """
    from safetensors.torch import save_file

    opened = SavedDirectory(_shards_of(checkpoint))
    saved = dcp.saved_tensors(opened, "model.")
    tensors = {name: torch.empty(entry.size, dtype=entry.dtype) for name, entry in saved.items()}
    opened.read_into({f"model.{name}": tensor for name, tensor in tensors.items()})
    _copy_beside(checkpoint, out)
    save_file(from_shards(tensors), os.path.join(out, ADAPTER_FILE), metadata={"format": "pt"})
    return [ADAPTER_FILE]


def _shards_of(checkpoint: str) -> str:
    """The DCP directory of a finished checkpoint.

    Raises:
        ValueError: not a finished checkpoint, or its weights are in other files.
    """
    if not commit.is_finished(checkpoint):
        found = f"has no {commit.COMPLETE}" if os.path.isdir(checkpoint) else "is no directory"
        raise ValueError(f"CHECKPOINT {checkpoint} {found}. Give a finished checkpoint-N directory of hf_fsdpturbo.")
    intact.check(checkpoint)
    directory = os.path.join(checkpoint, dcp.DCP_DIR)
    if not os.path.isdir(directory) or facts.read(checkpoint).get("weights") == "hub":
        kind = "its adapter" if is_of_adapter(checkpoint) else "its weights"
        raise ValueError(f"CHECKPOINT {checkpoint} holds {kind} in plain files already: load (or merge) it as it is.")
    check_checkpoint_links(checkpoint)
    return directory


def _copy_beside(checkpoint: str, out: str) -> None:
    """What of a checkpoint is not ours and no weights: config, tokenizer, adapter config."""
    os.makedirs(out, exist_ok=True)
    for entry in sorted(os.listdir(checkpoint)):
        source = os.path.join(checkpoint, entry)
        if not _OURS.fullmatch(entry):
            shutil.copytree(source, os.path.join(out, entry)) if os.path.isdir(source) else shutil.copy(source, out)
