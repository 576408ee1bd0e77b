"""Loading: the model is sharded while ``from_pretrained`` builds it, so that every rank reads only its own slices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_fsdpturbo.checkpoint.agreement import FAILURES, agree, world_size
from hf_fsdpturbo.checkpoint.files import cached_headers, local_headers
from hf_fsdpturbo.checkpoint.headers import check_headers
from hf_fsdpturbo.checkpoint.host_memory import freed_at_once

FRESH_HEADS = ("score.", "classifier.")
"""Task heads that a base checkpoint does not have: they start fresh, equal on all ranks. The rest must be there."""
REPLACED_HEAD = "lm_head."
"""The head of a base checkpoint, which a fresh task head takes the place of."""


@contextlib.contextmanager
def sharding_during_load(shard: Callable[[nn.Module], nn.Module]) -> Iterator[None]:
    """While open, ``from_pretrained(distributed_config=DistributedConfig())`` calls ``shard(model)`` on meta.

    That is after the model is built and before its weights are read. The class method that Transformers calls there
    is replaced for the length of the context, in this process; a contract test pins its name and arguments.
    """
    from transformers import PreTrainedModel

    own = PreTrainedModel.__dict__.get("maybe_distribute_model")

    def maybe_distribute_model(cls: type, model: nn.Module, distributed_config: Any, mesh_manager: Any) -> nn.Module:
        config: Any = model.config
        if getattr(config, "distributed_config", None) is not None:
            del config.distributed_config  # ours is not Transformers' own distribution: keep it out of config.json
        return shard(model)

    PreTrainedModel.maybe_distribute_model = classmethod(maybe_distribute_model)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        if own is None:
            del PreTrainedModel.maybe_distribute_model
        else:
            PreTrainedModel.maybe_distribute_model = own


def load_sharded(
    path: str,
    build: Callable[..., tuple[nn.Module, dict[str, Any]]],
    shard: Callable[[nn.Module], nn.Module],
    *,
    device: torch.device,
    **from_pretrained_kwargs: Any,
) -> nn.Module:
    """Build and load a model that is sharded by ``shard`` before its weights are read.

    Args:
        path: local directory or Hub id.
        build: a ``from_pretrained`` (or something that calls one with the keywords it gets).
        shard: shards a model on meta in place and returns it.
        device: where shards and non-persistent buffers live.
        from_pretrained_kwargs: passed on (``dtype``, ``attn_implementation``, ...).

    Raises:
        ValueError: a checkpoint file is missing, truncated or not safetensors; keys are missing, unexpected or of a
            wrong shape. Raised on every rank.
    """
    from transformers.distributed import DistributedConfig

    kwargs = dict(from_pretrained_kwargs)
    kwargs["device_map"] = None if device.type == "cpu" else {"": device}

    def shard_on_meta(model: nn.Module) -> nn.Module:
        check_headers(cast(Any, model), *(there or cached_headers(path, from_pretrained_kwargs)))
        keep_float32(model)
        with same_random_state(device):
            model = shard(model)
        draw_heads_whole(model)
        return model

    with freed_at_once(), raised_on_every_rank(path):
        there = local_headers(path, from_pretrained_kwargs)
        with sharding_during_load(shard_on_meta):
            model, info = build(path, distributed_config=DistributedConfig(), output_loading_info=True, **kwargs)
        fresh_heads = check_loading_info(path, info)
        own_storage(model)
    del model._init_weights
    report_fresh_heads(path, fresh_heads)
    return model


def load_whole(
    path: str, build: Callable[..., tuple[nn.Module, dict[str, Any]]], **from_pretrained_kwargs: Any
) -> nn.Module:
    """Load a model whole on the CPU, checked as :func:`load_sharded` does; no collective, so it may fail here alone.

    Raises:
        ValueError: as in :func:`load_sharded`, on this rank.
    """
    from transformers.distributed import DistributedConfig

    there = local_headers(path, from_pretrained_kwargs)

    def check(model: nn.Module) -> nn.Module:
        check_headers(cast(Any, model), *(there or cached_headers(path, from_pretrained_kwargs)))
        return model

    kwargs = {**from_pretrained_kwargs, "device_map": None}
    with sharding_during_load(check):
        model, info = build(path, distributed_config=DistributedConfig(), output_loading_info=True, **kwargs)
    report_fresh_heads(path, check_loading_info(path, info))
    return model


@contextlib.contextmanager
def raised_on_every_rank(path: str) -> Iterator[None]:
    """Exchange what loading ran into (a file may be damaged on one machine only); the block holds no collective.

    Raises:
        ValueError: the error itself where all ranks met the same, else one that names the ranks and the first message.
            In one process the error itself, of whatever class.
    """
    error: BaseException | None = None
    try:
        yield
    except FAILURES as caught:
        error = caught
    messages: list[str | None] = [None if error is None else str(error)]
    if world_size() > 1:
        messages = [None] * world_size()
        torch.distributed.all_gather_object(messages, None if error is None else str(error))
    if error is not None and len(set(messages)) == 1 and (isinstance(error, ValueError) or world_size() == 1):
        raise error
    agree(error, f"loading {path}")


@contextlib.contextmanager
def same_random_state(device: torch.device) -> Iterator[None]:
    """Random states of CPU and device are afterwards what they were: a fresh head must be drawn as in a plain load."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        with torch.random.fork_rng(devices=[index], device_type=device.type):
            yield


def share_random_state() -> None:
    """All ranks go on with rank 0's CPU random state: it alone has drawn what a checkpoint lacks. Collective.

    Adapters are drawn next: from states that differ, slices of different draws would be put together.
    """
    state = [torch.get_rng_state()]
    torch.distributed.broadcast_object_list(state, src=0)
    torch.set_rng_state(state[0])


def draw_heads_whole(model: nn.Module) -> None:
    """Make Transformers initialise a fresh task head as one process does: every rank draws it whole, keeps its slice.

    Left alone, each rank draws its own shard: a head that differs from one process's, and from rank to rank where it
    is replicated. Undo with ``del model._init_weights``.
    """
    own = cast(Any, model)._init_weights
    heads = {module for name, module in model.named_modules() if f"{name}.".startswith(FRESH_HEADS)}

    def init_weights(module: nn.Module) -> None:
        own_parameters = dict(module.named_parameters(recurse=False)) if module in heads else {}
        fresh = {n: p for n, p in own_parameters.items() if not getattr(p, "_is_hf_initialized", False)}
        for name, parameter in fresh.items():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            module._parameters[name] = nn.Parameter(whole, requires_grad=False)
        own(module)
        for name, parameter in fresh.items():
            copy_full_tensor_(parameter, module.get_parameter(name))
            module._parameters[name] = parameter

    cast(Any, model)._init_weights = init_weights


def report_fresh_heads(path: str, keys: list[str]) -> None:
    """Say once, on rank 0, which head starts fresh."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if keys and rank == 0:
        print(f"[hf_fsdpturbo] {path} has no {', '.join(keys)}: drawn at random, equal on all ranks.", flush=True)


def keep_float32(model: nn.Module) -> None:
    """Give parameters that Transformers keeps in float32 (some routers) that dtype on meta: FSDP fixes it early."""
    for parameter, kept in _kept_in_float32(model, cast(Any, model).dtype).items():
        parameter.data = parameter.data.to(kept)


def store_parameters(model: nn.Module, base: nn.Module, dtype: torch.dtype) -> None:
    """Convert a whole model's parameters in place, to what ``from_pretrained(dtype=...)`` gives them.

    Buffers stay as they are: rotary frequencies in bf16 are other positions.

    Args:
        model: what is converted, adapters included.
        base: the Transformers model in it, itself where there is no adapter.
        dtype: of all parameters but those that Transformers keeps in float32.
    """
    kept = _kept_in_float32(base, dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(kept.get(parameter, dtype))


def _kept_in_float32(model: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, torch.dtype]:
    """Parameters of a model in ``dtype`` that have another one by Transformers' plan."""
    from transformers.core_model_loading import build_glob_alternation

    plan = cast(Any, model)._get_dtype_plan(dtype)
    if not plan:
        return {}
    pattern, sources, _ = build_glob_alternation(list(plan))
    found = ((parameter, pattern.search(name)) for name, parameter in model.named_parameters())
    return {parameter: plan[sources[match.lastgroup]] for parameter, match in found if match is not None}


def check_loading_info(path: str, info: dict[str, Any]) -> list[str]:
    """Turn what Transformers only logs into errors; returns the fresh task-head keys.

    Raises:
        ValueError: missing, unexpected or mismatched keys.
    """
    missing = sorted(str(key) for key in info.get("missing_keys", ()))
    fresh = [key for key in missing if key.startswith(FRESH_HEADS)]
    unexpected = sorted(str(key) for key in info.get("unexpected_keys", ()))
    faults = {
        "missing": [key for key in missing if key not in fresh],
        "unexpected": [key for key in unexpected if not (fresh and key.startswith(REPLACED_HEAD))],
        "of another shape": sorted(str(key) for key in info.get("mismatched_keys", ())),
        "unreadable": sorted(str(message) for message in info.get("error_msgs", ())),
    }
    found = {kind: keys for kind, keys in faults.items() if keys}
    if found:
        text = "; ".join(f"{kind}: {keys[:5]}{' and more' if len(keys) > 5 else ''}" for kind, keys in found.items())
        raise ValueError(f"The checkpoint {path} does not fit the model: {text}. Use the model's own checkpoint.")
    return fresh


def own_storage(model: nn.Module) -> None:
    """Copy local shards that are views of a whole tensor (so the CPU loader leaves them), to let the whole go."""
    owned_by: dict[nn.Parameter, nn.Parameter] = {}  # tied weights are one parameter and stay one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            if parameter in owned_by:
                module._parameters[name] = owned_by[parameter]
                continue
            local = parameter.to_local()
            if local.device.type == "meta" or local.untyped_storage().nbytes() <= local.numel() * local.element_size():
                continue
            owned = DTensor.from_local(
                local.detach().clone(),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            owned_by[parameter] = nn.Parameter(owned, requires_grad=parameter.requires_grad)
            module._parameters[name] = owned_by[parameter]


def copy_full_tensor_(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into a parameter: this rank's slice if it is a DTensor, converted to its dtype.

    The slice is the one DTensor itself computes; cutting mesh axis by mesh axis is wrong where two axes share a dim.

    Raises:
        ValueError: the global shapes differ.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if tuple(target.shape) != tuple(full.shape):
        raise ValueError(f"A tensor of shape {tuple(full.shape)} does not fit a parameter of {tuple(target.shape)}.")
    with torch.no_grad():
        if not isinstance(target, DTensor):
            target.copy_(full)
            return
        shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        local = target.to_local()
        if local.numel():
            own = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            local.copy_(full[own].to(device=local.device, dtype=local.dtype))
