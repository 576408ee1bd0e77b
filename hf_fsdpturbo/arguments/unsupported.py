"""What hf_fsdpturbo does not do with the training arguments it is given: refused by name before anything starts.

Rows of the decision table that show in the arguments; those that need the model are refused where the model is seen.
"""

from __future__ import annotations

from typing import Any

from hf_fsdpturbo import launch_config
from hf_fsdpturbo.arguments.least_numbers import LEAST, refuse_numbers
from hf_fsdpturbo.arguments.params import FSDPTurboParams, KernelParams
from hf_fsdpturbo.bounded import check_path, cut
from hf_fsdpturbo.quantised.asked import asked_for

# Parts of optimizer names whose state or update has not been proven on sharded tensors.
_UNPROVEN_OPTIMIZERS = {"8bit": "8-bit", "4bit": "4-bit", "muon": "Muon"}
# Fine in one process. On sharded parameters only an elementwise update is right by itself; that of AdamW, SGD, Adagrad
# and RMSprop is, and schedule_free_* and grokadamw gave the same weights as in one process (2 gloo ranks, two meshes).
_UNSHARDABLE_OPTIMIZERS = {
    "adafactor": "it keeps row and column statistics of whole matrices (its first step fails on shards)",
    "galore": "it projects whole matrices to a low rank",
    "apollo": "it projects whole matrices to a low rank",
    "lomo": "it updates inside the backward pass, before gradients are reduced",
    "stable_adamw": "its update is scaled by the size of the whole tensor",
    **dict.fromkeys(("ademamix", "lion", "paged", "bnb"), "bitsandbytes' kernels are unproven on sharded parameters"),
}
_MODEL_KWARGS = {
    "distributed_config": "a model with its own distributed_config is",
    "tp_plan": "a model with its own tensor-parallel plan is",
}


def _refused(field: str, value: Any, why: str, fix: str) -> ValueError:
    return ValueError(f"{field}={cut(value)} is not supported by hf_fsdpturbo: {why}. {fix}")


def refuse_unsupported(args: Any) -> None:
    """Raise for every unsupported setting that shows before the device is set up.

    Args:
        args: training arguments whose hf_fsdpturbo fields are resolved.

    Raises:
        ValueError: naming field, value, reason and fix.
    """
    _refuse_paths(args)
    refuse_numbers({name: getattr(args, name, None) for name in LEAST})
    if getattr(args, "max_grad_norm", 0.0) is None:
        raise ValueError("max_grad_norm is None, but it must be a number. Use 0 to leave gradients unclipped.")
    _refuse_other_owners(args)
    if launch_config.world_size() > 1:  # one process takes what plain Trainer takes
        _refuse_training_fields(args)
        _refuse_optimizer(args, _UNPROVEN_OPTIMIZERS, "{} optimizers are unproven on sharded experts")
    _refuse_foreign_implementation(args)
    _refuse_parallelism(args)
    refuse_backend_fields(args.fsdpturbo_params, args.recompute)
    _refuse_double_liger(args, args.kernel_params)
    if args.cp_size > 1:
        _refuse_context_parallel(args)


def _refuse_paths(args: Any) -> None:
    for field in ("output_dir", "resume_from_checkpoint", "chat_template_path", "run_name", "logging_dir"):
        if isinstance(value := getattr(args, field, None), str):
            check_path(field, value)


def _refuse_other_owners(args: Any) -> None:
    for field, owner in (
        ("deepspeed", "DeepSpeed"),
        ("fsdp", "accelerate's FSDP"),
        ("fsdp_config", "accelerate's FSDP"),
    ):
        if value := getattr(args, field, None):
            raise _refused(field, value, f"it shards the model itself, so {owner} cannot", f"Leave {field} out.")


def _refuse_training_fields(args: Any) -> None:
    for field in ("fp16", "fp16_full_eval"):
        if getattr(args, field, False):
            raise _refused(field, True, "it trains in bf16 or fp32, without a gradient scaler", "Use bf16=True.")
    for field in ("torch_compile", "torch_compile_backend", "torch_compile_mode"):
        if value := getattr(args, field, None):
            raise _refused(field, value, "torch_compile is untested with expert dispatch", f"Leave {field} out.")
    if getattr(args, "auto_find_batch_size", False):
        raise _refused(
            "auto_find_batch_size",
            True,
            "a retry on one rank leaves the others waiting",
            "Set per_device_train_batch_size.",
        )


def _refuse_optimizer(args: Any, table: dict[str, str], why: str) -> None:
    optimizer = str(getattr(args.optim, "value", args.optim))
    for part, reason in table.items():
        if part in optimizer.lower():
            raise _refused("optim", optimizer, why.format(reason), "Use adamw_torch.")


def _refuse_foreign_implementation(args: Any) -> None:
    optimizer = str(getattr(args.optim, "value", args.optim))
    if args.optim_implementation == "fsdpturbo" and optimizer not in ("adamw_torch", "adamw_torch_fused"):
        raise ValueError(
            "optim_implementation='fsdpturbo' computes adamw_torch and adamw_torch_fused, but optim is "
            f"{optimizer!r}. Leave optim_implementation out."
        )


def _refuse_parallelism(args: Any) -> None:
    config = getattr(args, "parallelism_config", None)
    if config is None:
        return
    fields = ("cp_size", "sp_size", "tp_size", "dp_shard_size", "dp_replicate_size")
    sizes = {name: size for name in fields if (size := getattr(config, name, 1) or 1) > 1}
    if sizes:
        raise _refused(
            "parallelism_config",
            sizes,
            "it builds its own meshes",
            "Use cp_size, mp_replicate_size and ep_size instead.",
        )


def refuse_backend_fields(params: FSDPTurboParams, recompute: str) -> None:
    """Raise ValueError for fields of one ``ep_backend`` beside the other."""
    if params.ep_backend == "fsdp_turbo":
        if recompute != "full":
            raise ValueError(
                f"recompute={recompute!r} is not supported with ep_backend='fsdp_turbo': its experts keep nothing. "
                "Leave recompute out, or set ep_backend to 'torch'."
            )
        return
    for field, unset in (("hook_modules", []), ("fsdp_implementation", "native")):
        if (value := getattr(params, field)) != unset:
            raise ValueError(
                f"dist_config {field}={value!r} only means something with ep_backend='fsdp_turbo', but ep_backend is "
                f"{params.ep_backend!r}. Leave {field} out, or set ep_backend."
            )


def _refuse_double_liger(args: Any, kernels: KernelParams | None) -> None:
    if getattr(args, "use_liger_kernel", False) and kernels is not None and "liger" in kernels.name:
        raise ValueError(
            "use_liger_kernel=True together with kernel_config name 'liger' would patch the model twice. Keep one."
        )


def _refuse_context_parallel(args: Any) -> None:
    if (strategy := getattr(args, "train_sampling_strategy", "random")) == "batch_rebalance":
        raise _refused(
            "train_sampling_strategy",
            strategy,
            f"it gives ranks different batches, and with cp_size={args.cp_size} cp_size ranks share one",
            "Use 'random', or cp_size=1.",
        )


def _keep_ligers_swiglu_out(args: Any) -> None:
    """Set ``liger_kernel_config['swiglu']`` to False.

    The Trainer lets Liger patch the model in ``train()``, after sharding, and Liger's swiglu is a patch of the routed
    experts too: liger-kernel 0.8.5 overwrites their forward with ``LigerExperts``, which knows neither dispatcher nor
    shards. One keyword covers experts and dense MLPs, so these keep the model's own code.
    """
    config = getattr(args, "liger_kernel_config", None) or {}
    if config.get("swiglu"):
        raise _refused(
            "liger_kernel_config swiglu",
            config["swiglu"],
            "it replaces the forward of the experts, past the dispatcher",
            "Leave swiglu out.",
        )
    args.liger_kernel_config = {**config, "swiglu": False}


def settle_after_setup(args: Any) -> None:
    """Checks that need what ``TrainingArguments.__post_init__`` has built, and the settings that follow from them.

    With ``cp_size > 1``, ``dispatch_batches`` becomes False: accelerate slices dispatched batches by global rank. In a
    run of several processes, ``liger_kernel_config`` loses swiglu.

    Raises:
        ValueError: ``split_batches`` or ``dispatch_batches=True`` with ``cp_size > 1``; an unsupported model keyword,
            or an optimizer or Liger setting that cannot work on a sharded model.
    """
    liger, kernels = getattr(args, "use_liger_kernel", False), args.kernel_params
    if liger and kernels is not None and "auto" in kernels.name and args.device.type == "cuda":
        raise ValueError(
            "use_liger_kernel=True together with kernel_config name 'auto', which means Liger's kernels on cuda, "
            "would patch the model twice. Keep one."
        )
    if args.world_size > 1:
        _refuse_optimizer(args, _UNSHARDABLE_OPTIMIZERS, "{}")
        if liger:
            _keep_ligers_swiglu_out(args)
    kwargs = getattr(args, "model_init_kwargs", None) or {}
    if isinstance(kwargs, dict):
        asked_for(kwargs, "model_init_kwargs ")
    for name, what in _MODEL_KWARGS.items():
        if isinstance(kwargs, dict) and kwargs.get(name):
            raise _refused(f"model_init_kwargs {name}", kwargs[name], f"{what} refused", f"Leave {name} out.")
    params = args.fsdpturbo_params
    if params.offload_params and params.pin_memory and args.device.type == "cpu":
        raise _refused(
            "dist_config pin_memory",
            True,
            "pages are pinned for an accelerator, and this run has none",
            "Set pin_memory to False beside offload_params, or leave offload_params out.",
        )
    if args.cp_size == 1:
        return
    config = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name, None):
            raise _refused(
                f"accelerator_config {name}",
                True,
                f"it slices batches by global rank, and with cp_size={args.cp_size} cp_size ranks share one batch",
                f"Leave {name} out, or set cp_size=1.",
            )
    config.dispatch_batches = False
