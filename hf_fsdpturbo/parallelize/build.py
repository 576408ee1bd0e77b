"""From a path or a model object to a sharded model, through the doors that TRL and Transformers use."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import set_seed

from hf_fsdpturbo.checkpoint.adapters import is_peft
from hf_fsdpturbo.checkpoint.files import WHERE
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState, Topology
from hf_fsdpturbo.parallelize import (
    ShardingReport,
    check_model,
    fsdp_options,
    parallelize_model,
    prepare_one_process,
)
from hf_fsdpturbo.parallelize.adapters import Adapter
from hf_fsdpturbo.parallelize.initial_weights import (
    copy_shards,
    load_dcp,
    load_on_rank0,
    own_class,
    weights_from_rank0,
)
from hf_fsdpturbo.parallelize.same_on_all_ranks import check_same_model
from hf_fsdpturbo.parallelize.scale_check import check_gradient_scale
from hf_fsdpturbo.weights import (
    load_sharded,
    load_whole,
    raised_on_every_rank,
    share_random_state,
    store_parameters,
)

if TYPE_CHECKING:
    from hf_fsdpturbo.arguments import FSDPTurboArguments

STORAGE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def _from_pretrained(
    trainer_class: type, config: FSDPTurboArguments, defaults: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The loader that the trainer's family uses, and its keywords. TRL trainers take TRL's own."""
    kwargs: dict[str, Any] = {**defaults, **(getattr(config, "model_init_kwargs", None) or {})}
    for name in ("device_map", "distributed_config", "tp_plan", "quantization_config"):
        if kwargs.pop(name, None) is not None:
            raise ValueError(
                f"model_init_kwargs[{name!r}] is not supported: placement is decided by hf_fsdpturbo. Remove it."
            )
    storage = STORAGE_DTYPES.get(config.fsdpturbo_params.param_storage_dtype)
    if storage is not None:
        kwargs["dtype"] = storage
    trl_trainers = [c.__name__ for c in trainer_class.__mro__ if c.__module__.startswith("trl.")]
    if not trl_trainers:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained, kwargs
    from trl.trainer.utils import create_model_from_path

    kwargs.setdefault("trust_remote_code", getattr(config, "trust_remote_code", False))
    if "RewardTrainer" in trl_trainers:
        from transformers import AutoModelForSequenceClassification

        kwargs["num_labels"] = 1  # the only output is the reward
        return partial(create_model_from_path, architecture=AutoModelForSequenceClassification), kwargs
    return create_model_from_path, kwargs


def build_model(
    trainer_class: type,
    path: str,
    config: FSDPTurboArguments,
    state: FSDPTurboParallelState | None,
    *,
    defaults: dict[str, Any] | None = None,
    use_dcp_path: bool = True,
    peft_config: Any = None,
) -> tuple[Any, ShardingReport]:
    """Load a model from a path, every rank its own slices; in one process, load it whole.

    ``defaults`` are ``from_pretrained`` keywords below ``model_init_kwargs``. ``use_dcp_path=False``: the model is not
    the one that ``dist_config`` ``dcp_path`` is about (a reference of its own). With ``peft_config`` a sharded run
    returns the PEFT model; in one process TRL makes it.

    Raises:
        ValueError: the checkpoint is damaged or does not fit; sizes do not fit the model.
    """
    build, kwargs = _from_pretrained(trainer_class, config, defaults or {})
    with raised_on_every_rank(path):
        _refuse_quantised(path, kwargs)
    set_seed(cast(Any, config).seed)  # where TRL does it too: what a checkpoint lacks is drawn from here on
    if state is None:
        model = load_whole(path, build, **kwargs)
        return _filled(model, config, use_dcp_path), prepare_one_process(model, config, Topology.resolve(1))
    check_gradient_scale(state, fsdp_options(config))
    adapter, device = Adapter(peft_config), _shard_device(config)
    reports: list[ShardingReport] = []
    if config.init_params.name == "init_on_default":
        with raised_on_every_rank(path):
            model = load_whole(path, build, **kwargs)
        check_model(model, config, state)
        model, report = adapter.parallelize(model, config, state)
        _place_unsharded(model, config.device)
        return adapter.finish(_filled(model, config, use_dcp_path), device), report

    def shard(model: nn.Module) -> nn.Module:
        sharded, report = adapter.parallelize(model, config, state)
        reports.append(report)
        return sharded

    if config.init_params.name == "init_on_rank0":
        whole = load_on_rank0(partial(load_whole, path, build, **kwargs))
        share_random_state()
        with weights_from_rank0(whole, device):
            model = load_sharded(path, build, shard, device=device, **kwargs)
    else:
        model = load_sharded(path, build, shard, device=device, **kwargs)
    if device != config.device:
        _place_unsharded(model, config.device)
    return adapter.finish(_filled(model, config, use_dcp_path), device), reports[0]


def _shard_device(config: FSDPTurboArguments) -> torch.device:
    """Where shards live between uses: on the host with ``offload_params``."""
    return torch.device("cpu") if config.fsdpturbo_params.offload_params else config.device


def _filled(model: Any, config: FSDPTurboArguments, use_dcp_path: bool) -> Any:
    """The model with the weights of ``dcp_path``, where there is one."""
    dcp_path = config.fsdpturbo_params.dcp_path
    if dcp_path is not None and use_dcp_path:
        load_dcp(model, dcp_path)
    return model


def reload_weights(
    model: Any, directory: str, config: FSDPTurboArguments, state: FSDPTurboParallelState | None
) -> None:
    """Fill a (sharded) model in place from Hub files: a second one is loaded beside it for a moment."""
    loader = partial(own_class(model).from_pretrained, dtype=model.dtype)
    if state is None:
        fresh = loader(directory)
    else:
        placed = partial(parallelize_model, args=config, state=state)
        fresh = load_sharded(directory, loader, lambda meta: placed(meta)[0], device=_shard_device(config))
    copy_shards(model, fresh)


def _refuse_quantised(path: str, kwargs: dict[str, Any]) -> None:
    from transformers import AutoConfig

    where = {name: kwargs[name] for name in WHERE if kwargs.get(name)}
    loaded = AutoConfig.from_pretrained(path, trust_remote_code=kwargs.get("trust_remote_code", False), **where)
    if getattr(loaded, "quantization_config", None) is not None:
        raise ValueError(f"The checkpoint {path} is quantised, which is not supported: use its unquantised version.")


def shard_given_model(
    model: Any,
    config: FSDPTurboArguments,
    state: FSDPTurboParallelState | None,
    *,
    use_dcp_path: bool = True,
    peft_config: Any = None,
) -> tuple[Any, ShardingReport]:
    """Shard a model object that every rank holds whole, in place; in one process, only convert its dtype.

    It may be a PEFT model; with ``peft_config`` a sharded run makes it one.

    Raises:
        ValueError: sizes do not fit the model, or the ranks hold different models.
    """
    base = model.get_base_model() if is_peft(model) else model
    storage = STORAGE_DTYPES.get(config.fsdpturbo_params.param_storage_dtype)
    if storage is not None:
        store_parameters(model, base, storage)
    if state is None:
        return _filled(model, config, use_dcp_path), prepare_one_process(model, config, Topology.resolve(1))
    set_seed(cast(Any, config).seed)  # where TRL does it too, before it draws an adapter
    adapter = Adapter(peft_config, model)
    check_same_model(model)
    check_gradient_scale(state, fsdp_options(config))
    base, report = adapter.parallelize(base, config, state)
    if config.init_params.name != "init_on_meta":
        report.notes.append(f"init_config {config.init_params.name} has no effect: model is an object, not a path")
    _place_unsharded(base, config.device)
    return adapter.finish(_filled(base, config, use_dcp_path), _shard_device(config)), report


def _place_unsharded(model: nn.Module, device: torch.device) -> None:
    """Buffers and parameters that no FSDP unit manages; units place their own."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(device)
