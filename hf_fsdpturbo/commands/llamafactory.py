"""A LlamaFactory training YAML in our words: a recipe, the fields of a launch file, and what has no counterpart.

Both of its layouts are read: the one of its FSDPTurbo plugin (``model``, ``dist_config``, ``micro_batch_size``) and
the older one (``stage``, ``finetuning_type``, ``model_name_or_path``). What a key becomes is data, below;
``docs/from_llamafactory.md`` explains it. Names of ``transformers.TrainingArguments`` pass as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_fsdpturbo.bounded import cut, read_settings
from hf_fsdpturbo.commands.known_names import stock_names
from hf_fsdpturbo.commands.llamafactory_data import described_sets, mapping, named_sets
from hf_fsdpturbo.topology import positive

SAME = {
    "model": "model_name_or_path",
    "model_name_or_path": "model_name_or_path",
    "trust_remote_code": "trust_remote_code",
    "output_dir": "output_dir",
    "micro_batch_size": "per_device_train_batch_size",
    "cutoff_len": "max_length",
    "init_config": "init_config",
    "packing": "packing",
    "lora_rank": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "pref_beta": "beta",
    "pref_loss": "loss_type",
    "preprocessing_num_workers": "dataset_num_proc",
    "enable_liger_kernel": "use_liger_kernel",
    "streaming": "dataset_streaming",
}
"""Key -> argument of our recipes with the same value."""

TOPOLOGY = ("dp_size", "cp_size", "cp_mode", "mp_replicate_size", "mp_shard_size", "dist_timeout")
"""Public sizes: fields of the launch file, wherever they stood."""

LEFT_OUT = {
    "template": "the tokenizer's own chat template is used; chat_template_path gives another",
    "model_class": "the recipe says it: sft and dpo train language models, reward trains classifiers",
    "do_train": "a recipe trains",
    "overwrite_cache": "datasets keys its cache by content",
    "overwrite_output_dir": "a finished checkpoint is never written over",
    "plot_loss": "report_to: tensorboard or trackio shows it",
    "dataset_dir": "is in the paths of the data sets",
    "sample_backend": "nothing is sampled after training",
    "max_new_tokens": "nothing is sampled after training",
    "deepspeed": "experts and dense weights are sharded by hf_fsdpturbo",
    "fsdp": "experts and dense weights are sharded by hf_fsdpturbo",
    "ray_run_name": "is Ray's",
    "val_size": "give test_split_size in `datasets`, or dataset_test_split and eval_strategy",
    "use_v1_kernels": "became kernel_config",
    "dist_config.param_dtype": "bf16: true computes in bf16; param_storage_dtype says how weights are stored",
    "dist_config.reduce_dtype": "gradients are always reduced in float32",
    "dist_config.ep_modules": "the model's spec knows its experts (FSDPTurboEPModelSpec.register for another)",
    "dist_config.ep_fsdp_modules": "the model's spec knows its experts (FSDPTurboEPModelSpec.register for another)",
    "dist_config.name": "is said by our trainers",
    "peft_config.name": "is LoRA",
    "quant_config.name": "is bitsandbytes",
}
"""Key -> why it has no counterpart."""

REFUSED = {
    "freeze": "finetuning_type freeze: train full, or use LoRA",
    "oft": "finetuning_type oft: use LoRA",
}
CONVERTED_ROWS = "became `datasets`; Alpaca's and ShareGPT's rows are converted while loading"
STAGES = {"sft": "sft", "dpo": "dpo", "rm": "reward"}
ATTENTION = {"fa2": "flash_attention_2", "flash_attention_2": "flash_attention_2", "sdpa": "sdpa", "eager": "eager",
             "disabled": "eager", "auto": None}  # fmt: skip
PEFT = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


@dataclass
class Converted:
    """What a file became.

    Attributes:
        command: ``sft``, ``dpo`` or ``reward``.
        recipe: arguments of that recipe.
        launch: public sizes and ``dist_config``, for the accelerate YAML.
        notes: ``(key, what became of it)`` where it is not simply the same.
        batch: sequences of a global batch, where the file said so.
    """

    command: str = "sft"
    recipe: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    batch: int | None = None


def convert(path: str) -> Converted:
    """Read a file.

    Raises:
        ValueError: it is no such file, or has a key or value that we cannot honour; names key, value and reason.
        OSError: it cannot be read.
    """
    given = read_settings(path)
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"{path} must be a YAML mapping of names to values, but it is {cut(given)}.")
    if not {"model", "model_name_or_path"} & given.keys():
        raise ValueError(f"{path} names no model: LlamaFactory's `model` or `model_name_or_path` is missing.")
    found = Converted()
    training = stock_names()
    for key, value in given.items():
        if value is None:
            continue
        special = _SPECIAL.get(key)
        if special is not None:
            special(found, value, Path(path).parent, given)
        elif key in SAME:
            found.recipe[SAME[key]] = value
        elif key in TOPOLOGY:
            found.launch[key] = value
        elif key in LEFT_OUT:
            found.notes.append((key, f"left out: {LEFT_OUT[key]}"))
        elif key in training:
            found.recipe[key] = value
        else:
            raise ValueError(f"{key}={cut(value)} is not known here. Remove it, and see docs/from_llamafactory.md.")
    return found


def _stage(found: Converted, value: Any, *_: Any) -> None:
    if not isinstance(value, str) or value not in STAGES:
        raise ValueError(f"stage={cut(value)} has no recipe here: there are {', '.join(STAGES)}.")
    found.command = STAGES[value]


def _finetuning(found: Converted, value: Any, *_: Any) -> None:
    if value not in ("full", "lora"):
        raise ValueError(f"{REFUSED.get(str(value), f'finetuning_type={cut(value)}: full and lora are known')}.")
    found.recipe |= {"use_peft": True} if value == "lora" else {}


def _targets(found: Converted, value: Any, *_: Any) -> None:
    names = value.split(",") if isinstance(value, str) else list(value)
    found.recipe["lora_target_modules"] = "all-linear" if names == ["all"] else [str(name).strip() for name in names]
    if names == ["all"]:
        found.notes.append(("lora_target", "all-linear: attention; experts are stacked: lora_target_parameters"))


def _peft(found: Converted, value: Any, *_: Any) -> None:
    for key, item in mapping("peft_config", value).items():
        if key == "name" and item != "lora":
            raise ValueError(f"peft_config name={cut(item)}: only lora is known.")
        if key == "target_modules":
            _targets(found, item)
        elif key in PEFT:
            found.recipe[PEFT[key]] = item
        elif f"peft_config.{key}" not in LEFT_OUT:
            raise ValueError(f"peft_config {key}={cut(item)} is not known here. Remove it.")
    found.recipe["use_peft"] = True


def _dist(found: Converted, value: Any, *_: Any) -> None:
    config = dict(mapping("dist_config", value))
    name = config.get("name", "fsdpturbo")
    if name != "fsdpturbo":
        found.notes.append(("dist_config.name", f"{name} became our FSDP2; set ep_size to spread the experts"))
    for key in [key for key in config if f"dist_config.{key}" in LEFT_OUT]:
        config.pop(key)
        if key != "name":
            found.notes.append((f"dist_config.{key}", f"left out: {LEFT_OUT[f'dist_config.{key}']}"))
    found.launch |= {key: config.pop(key) for key in TOPOLOGY if key in config}
    config = {key: item for key, item in config.items() if item is not None}
    if config:
        found.launch["dist_config"] = config


def _kernels(found: Converted, value: Any, *_: Any) -> None:
    config = dict(mapping("kernel_config", value))
    if config.get("include_kernels") in ("auto", True):
        config.pop("include_kernels")
        found.notes.append(("kernel_config.include_kernels", "left out: all operators are the default"))
    found.recipe["kernel_config"] = config


def _v1_kernels(found: Converted, value: Any, *_: Any) -> None:
    if value:
        found.recipe.setdefault("kernel_config", {"name": "auto"})
        found.notes.append(("use_v1_kernels", "became kernel_config: {name: auto}"))


def _attention(found: Converted, value: Any, *_: Any) -> None:
    if not isinstance(value, str) or value not in ATTENTION:
        raise ValueError(f"flash_attn={cut(value)} is not known here: there are {', '.join(ATTENTION)}.")
    if ATTENTION[value] is not None:
        found.recipe["attn_implementation"] = ATTENTION[value]


def _no_checkpointing(found: Converted, value: Any, *_: Any) -> None:
    found.recipe["activation_checkpointing"] = not value


def _global_batch(found: Converted, value: Any, *_: Any) -> None:
    found.batch = positive("global_batch_size", value)


def _quantised(found: Converted, value: Any, *_: Any) -> None:
    bits = value if isinstance(value, int) else mapping("quant_config", value).get("quantization_bit")
    if bits != 4:
        raise ValueError(f"quantization_bit={cut(bits)}: 4 bits are known (load_in_4bit).")
    found.recipe["load_in_4bit"] = True


def _warmup_ratio(found: Converted, value: Any, *_: Any) -> None:
    found.recipe["warmup_steps"] = value
    found.notes.append(("warmup_ratio", "became warmup_steps: a number below 1 is a share of all steps"))


def _described(found: Converted, value: Any, folder: Path, given: Mapping[str, Any]) -> None:
    found.recipe["datasets"] = described_sets(value, folder)
    found.notes.append(("train_dataset", CONVERTED_ROWS))


def _named(found: Converted, value: Any, folder: Path, given: Mapping[str, Any]) -> None:
    found.recipe["datasets"] = named_sets(value, folder, given)
    found.notes.append(("dataset", CONVERTED_ROWS))


_SPECIAL = {
    "stage": _stage,
    "finetuning_type": _finetuning,
    "lora_target": _targets,
    "peft_config": _peft,
    "dist_config": _dist,
    "kernel_config": _kernels,
    "use_v1_kernels": _v1_kernels,
    "flash_attn": _attention,
    "disable_gradient_checkpointing": _no_checkpointing,
    "global_batch_size": _global_batch,
    "quant_config": _quantised,
    "quantization_bit": _quantised,
    "warmup_ratio": _warmup_ratio,
    "train_dataset": _described,
    "dataset": _named,
    "max_samples": lambda *_: None,  # with `dataset`
}
