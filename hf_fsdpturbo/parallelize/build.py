"""From a path or a model object to a sharded model, through the doors that TRL and Transformers use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, set_seed

from hf_fsdpturbo.loading.config_values import check_values
from hf_fsdpturbo.loading.dtypes import store_parameters
from hf_fsdpturbo.loading.files import WHERE, base_of_adapter, refuse_impossible, refuse_trusted_base
from hf_fsdpturbo.loading.from_dcp import load_dcp
from hf_fsdpturbo.loading.from_rank0 import load_on_rank0, weights_from_rank0
from hf_fsdpturbo.loading.heads import share_random_state
from hf_fsdpturbo.loading.seam import load_sharded, load_whole
from hf_fsdpturbo.lora.adapter_files import is_peft
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState, Topology
from hf_fsdpturbo.parallelize.adapter_of_load import Adapter
from hf_fsdpturbo.parallelize.fused_experts import register_experts_implementation
from hf_fsdpturbo.parallelize.order import (
    ShardingReport,
    check_model,
    fsdp_options,
    prepare_one_process,
    shard_device,
)
from hf_fsdpturbo.parallelize.quantise import filling_of, kept_of
from hf_fsdpturbo.parallelize.same_model import check_same_model
from hf_fsdpturbo.parallelize.scale_check import check_gradient_scale
from hf_fsdpturbo.parallelize.trainer_family import model_loader
from hf_fsdpturbo.quantised.asked import take
from hf_fsdpturbo.quantised.filling import Filling, reading
from hf_fsdpturbo.quantised.methods import PackedAs, check_asked, packed_as
from hf_fsdpturbo.ranks import raised_on_every_rank

if TYPE_CHECKING:
    from hf_fsdpturbo.arguments import FSDPTurboArguments

STORAGE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_model(
    trainer_class: type,
    path: str,
    config: FSDPTurboArguments,
    state: FSDPTurboParallelState | None,
    *,
    defaults: dict[str, Any] | None = None,
    use_dcp_path: bool = True,
    peft_config: Any = None,
    head_unit: bool = False,
    with_images: bool = False,
    with_reference: bool = False,
    quantization_config: Any = None,
) -> tuple[Any, ShardingReport]:
    """Load a model from a path, every rank its own slices; in one process, load it whole.

    ``defaults`` are ``from_pretrained`` keywords below ``model_init_kwargs``. ``use_dcp_path=False``: the model is not
    the one that ``dist_config`` ``dcp_path`` is about (a reference of its own). With ``peft_config`` a sharded run
    returns the PEFT model; in one process TRL makes it, but on packed weights. ``quantization_config`` is the
    trainer's own, beside the one in ``model_init_kwargs``.

    Raises:
        ValueError: the checkpoint is damaged or does not fit; sizes do not fit the model.
    """
    register_experts_implementation()
    build, kwargs = model_loader(trainer_class, config, defaults or {}, path)
    storage = STORAGE_DTYPES.get(config.fsdpturbo_params.param_storage_dtype)
    if storage is not None:
        kwargs["dtype"] = storage
    kwargs["drop_unused"] = config.drop_unused_tensors
    setting = kwargs.get("quantization_config", quantization_config)
    filling = filling_of(take(kwargs, quantization_config), config)
    if filling is not None:
        build = reading(build, filling)
    with raised_on_every_rank(f"loading {path}"):
        refuse_trusted_base(path, bool(kwargs.get("trust_remote_code")))
        refuse_impossible(path, kwargs)
        release = _check_config(path, kwargs, setting)
    notes: list[str] = []
    if filling is None and peft_config is not None and base_of_adapter(path) == path:
        filling, notes = kept_of(release, setting, config)
        kwargs["know"] = filling.know if filling is not None else lambda packed: None
    set_seed(cast(Any, config).seed)  # where TRL does it too: what a checkpoint lacks is drawn from here on
    adapter = Adapter(
        peft_config, head_unit=head_unit, with_images=with_images, with_reference=with_reference, filling=filling
    )
    if state is None:
        if filling is not None:
            return _one_process(partial(load_whole, path, build, prepare=adapter.alone, **kwargs), adapter, config)
        with raised_on_every_rank(f"loading {path}"):
            model = load_whole(path, build, **kwargs)
        report = prepare_one_process(model, config, Topology.resolve(1))
        return _reported(_filled(model, config, use_dcp_path), report, filling, notes)
    check_gradient_scale(state, fsdp_options(config))
    device = shard_device(config)
    reports: list[ShardingReport] = []
    if config.init_params.name == "init_on_default":
        with raised_on_every_rank(f"loading {path}"):
            model = load_whole(path, build, **kwargs)
        check_model(model, config, state)
        model, report = adapter.parallelize(model, config, state)
        _place_unsharded(model, config.device)
        return _reported(adapter.finish(_filled(model, config, use_dcp_path), device), report, filling, notes)

    def shard(model: nn.Module) -> nn.Module:
        sharded, report = adapter.parallelize(model, config, state)
        reports.append(report)
        return sharded

    if config.init_params.name == "init_on_rank0":
        whole = load_on_rank0(partial(load_whole, path, build, **kwargs))
        share_random_state()
        with weights_from_rank0(whole, device):
            model = load_sharded(path, build, shard, device=device, check_loading=config.check_loading, **kwargs)
    else:
        model = load_sharded(path, build, shard, device=device, check_loading=config.check_loading, **kwargs)
    if device != config.device:
        _place_unsharded(model, config.device)
    return _reported(adapter.finish(_filled(model, config, use_dcp_path), device), reports[0], filling, notes)


def _one_process(load: Callable[[], Any], adapter: Adapter, config: FSDPTurboArguments) -> tuple[Any, ShardingReport]:
    """A model with quantised weights, and its adapter, in one process."""
    base = load()
    model = adapter.finish(base, config.device)
    return _reported(model, prepare_one_process(base, config, Topology.resolve(1)), adapter.filling)


def _reported(
    model: Any, report: ShardingReport, filling: Filling | None, notes: Sequence[str] = ()
) -> tuple[Any, ShardingReport]:
    report.notes += [*notes, *([str(filling)] if filling is not None and filling.weights else [])]
    return model, report


def _filled(model: Any, config: FSDPTurboArguments, use_dcp_path: bool) -> Any:
    """The model with the weights of ``dcp_path``, where there is one."""
    dcp_path = config.fsdpturbo_params.dcp_path
    if dcp_path is not None and use_dcp_path:
        load_dcp(model, dcp_path, config.verify_checkpoint)
    return model


def _check_config(path: str, kwargs: dict[str, Any], setting: Any) -> PackedAs | None:
    """Refuse a config that cannot be; returns how the release is packed."""
    from transformers import AutoConfig

    where = {name: kwargs[name] for name in WHERE if kwargs.get(name)}
    loaded = AutoConfig.from_pretrained(path, trust_remote_code=kwargs.get("trust_remote_code", False), **where)
    values, what = loaded.to_dict(), f"The checkpoint {path}"
    check_values(f"The config of {path}", values)
    release = packed_as(values, what)
    check_asked(setting, release, what)
    return release


def shard_given_model(
    model: Any,
    config: FSDPTurboArguments,
    state: FSDPTurboParallelState | None,
    *,
    use_dcp_path: bool = True,
    peft_config: Any = None,
    head_unit: bool = False,
    with_images: bool = False,
    with_reference: bool = False,
    quantization_config: Any = None,
) -> tuple[Any, ShardingReport]:
    """Shard a model object that every rank holds whole, in place; in one process, only convert its dtype.

    It may be a PEFT model; with ``peft_config`` a sharded run makes it one. With ``quantization_config`` its frozen
    weights are quantised in place, one after the other.

    Raises:
        ValueError: sizes do not fit the model, or the ranks hold different models.
    """
    base = model.get_base_model() if is_peft(model) else model
    if isinstance(getattr(base, "config", None), PreTrainedConfig):
        check_values(f"The config of {type(base).__name__}", base.config.to_dict())
    storage = STORAGE_DTYPES.get(config.fsdpturbo_params.param_storage_dtype)
    if storage is not None:
        store_parameters(model, base, storage)
    filling = filling_of(take({}, quantization_config), config)
    adapter = Adapter(
        peft_config,
        model,
        head_unit=head_unit,
        with_images=with_images,
        with_reference=with_reference,
        filling=filling,
    )
    if state is None and filling is not None:
        set_seed(cast(Any, config).seed)
        return _one_process(partial(adapter.alone, base), adapter, config)
    if state is None:
        return _filled(model, config, use_dcp_path), prepare_one_process(model, config, Topology.resolve(1))
    set_seed(cast(Any, config).seed)  # where TRL does it too, before it draws an adapter
    check_same_model(model)
    check_gradient_scale(state, fsdp_options(config))
    base, report = adapter.parallelize(base, config, state)
    if config.init_params.name != "init_on_meta":
        report.notes.append(f"init_config {config.init_params.name} has no effect: model is an object, not a path")
    _place_unsharded(base, config.device)
    return _reported(adapter.finish(_filled(base, config, use_dcp_path), shard_device(config)), report, filling)


def _place_unsharded(model: nn.Module, device: torch.device) -> None:
    """Buffers and parameters that no FSDP unit manages; units place their own."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(device)
