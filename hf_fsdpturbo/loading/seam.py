"""Loading: the model is sharded while ``from_pretrained`` builds it, so that every rank reads only its own slices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from hf_fsdpturbo.loading.dtypes import keep_float32
from hf_fsdpturbo.loading.files import cached_headers, headers_of_node, local_headers
from hf_fsdpturbo.loading.headers import check_headers, check_sources
from hf_fsdpturbo.loading.heads import (
    FRESH_HEADS,
    draw_heads_whole,
    initialise_as_usual,
    report_fresh_heads,
    same_random_state,
)
from hf_fsdpturbo.loading.host_memory import freed_at_once
from hf_fsdpturbo.loading.loading_check import check_loaded
from hf_fsdpturbo.loading.open_files import Headers, OpenFiles, opened_on_demand
from hf_fsdpturbo.loading.packed_release import built_in_full, packed_of, report_packed
from hf_fsdpturbo.loading.source_map import SourceMap
from hf_fsdpturbo.loading.unused_keys import settle_unused
from hf_fsdpturbo.loading.whole_sources import exact_conversions
from hf_fsdpturbo.quantised.block_scales import Packed
from hf_fsdpturbo.ranks import raised_on_every_rank
from hf_fsdpturbo.shards import own_storage


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
    drop_unused: bool = False,
    check_loading: str = "sample",
    know: Callable[[dict[str, Packed]], None] = lambda packed: None,
    **from_pretrained_kwargs: Any,
) -> nn.Module:
    """Build and load a model that is sharded by ``shard`` before its weights are read.

    Args:
        path: local directory or Hub id.
        build: a ``from_pretrained`` (or something that calls one with the keywords it gets).
        shard: shards a model on meta in place and returns it.
        device: where shards and non-persistent buffers live.
        drop_unused: tensors of the checkpoint that the model class does not use are not carried into exports.
        check_loading: how much is compared with the files afterwards: ``sample``, ``full`` or ``off``.
        know: called with the tensors that the files hold packed, by key, before ``shard``.
        from_pretrained_kwargs: passed on (``dtype``, ``attn_implementation``, ...).

    Raises:
        ValueError: a checkpoint file is missing, truncated or not safetensors; keys are missing or of a
            wrong shape; a conversion fails; what was loaded is not what the files hold. Raised on every rank.
    """
    from transformers.distributed import DistributedConfig

    kwargs = dict(from_pretrained_kwargs)
    kwargs["device_map"] = None if device.type == "cpu" else {"": device}
    found = SourceMap()
    fault, there = headers_of_node(path, from_pretrained_kwargs)
    files: OpenFiles | None = None

    def shard_on_meta(model: nn.Module) -> nn.Module:
        nonlocal there, files
        there = there or cached_headers(path, from_pretrained_kwargs)
        files = OpenFiles(*there)
        keep_float32(model)
        know(files.packed)
        with same_random_state(device):
            model = shard(model)
        draw_heads_whole(model)
        return model

    def check(model: nn.Module) -> None:
        if files is not None and files.used:
            check_sources(found, model, *cast(tuple[str, Headers], there))
        elif files:
            check_headers(cast(Any, model), *cast(tuple[str, Headers], there))

    with freed_at_once(), raised_on_every_rank(f"loading {path}"):
        if fault is not None:
            raise fault
        with (
            built_in_full(),
            sharding_during_load(shard_on_meta),
            exact_conversions(device, found, check),
            opened_on_demand(lambda: files or None),
        ):
            model, info = build(path, distributed_config=DistributedConfig(), output_loading_info=True, **kwargs)
        fresh_heads = check_loading_info(path, info)
        own_storage(model)
        if files is not None and there is not None:
            check_loaded(model, found, files, check_loading)
            files.close()
            walked = files.used and found.conversions  # neither where rank 0 sends the weights
            unknown = found.unknown if walked else check_headers(cast(Any, model), *there)
            settle_unused(path, model, *there, unknown, fresh_head=bool(fresh_heads), drop=drop_unused)
            report_packed(path, model, there[1])
    initialise_as_usual(model)
    report_fresh_heads(path, fresh_heads)
    return model


def load_whole(
    path: str,
    build: Callable[..., tuple[nn.Module, dict[str, Any]]],
    drop_unused: bool = False,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    know: Callable[[dict[str, Packed]], None] = lambda packed: None,
    **from_pretrained_kwargs: Any,
) -> nn.Module:
    """Load a model whole on the CPU, checked as :func:`load_sharded` does; no collective, so it may fail here alone.

    ``prepare`` gets the model on meta, before its weights are read, and returns it; ``know`` as there.

    Raises:
        ValueError: as in :func:`load_sharded`, on this rank.
    """
    from transformers.distributed import DistributedConfig

    there = local_headers(path, from_pretrained_kwargs)
    unknown: list[str] = []

    def check(model: nn.Module) -> nn.Module:
        nonlocal there
        there = there or cached_headers(path, from_pretrained_kwargs)
        unknown.extend(check_headers(cast(Any, model), *there))
        know(packed_of(there[1]))
        return prepare(model)

    def packed() -> OpenFiles | None:
        return stack.enter_context(contextlib.closing(OpenFiles(*there))) if there and packed_of(there[1]) else None

    kwargs = {**from_pretrained_kwargs, "device_map": None}
    with contextlib.ExitStack() as stack:
        stack.enter_context(built_in_full())
        stack.enter_context(sharding_during_load(check))
        stack.enter_context(opened_on_demand(packed))
        stack.enter_context(exact_conversions(torch.device("cpu"), SourceMap(), packed_only=True))
        model, info = build(path, distributed_config=DistributedConfig(), output_loading_info=True, **kwargs)
    fresh_heads = check_loading_info(path, info)
    report_fresh_heads(path, fresh_heads)
    if there is not None:
        settle_unused(path, model, *there, unknown, fresh_head=bool(fresh_heads), drop=drop_unused)
        report_packed(path, model, there[1])
    return model


def check_loading_info(path: str, info: dict[str, Any]) -> list[str]:
    """Turn what Transformers only logs into errors; returns the fresh task-head keys.

    Keys that the model class does not use are no fault: :func:`settle_unused` lists them.

    Raises:
        ValueError: missing or mismatched keys.
    """
    missing = sorted(str(key) for key in info.get("missing_keys", ()))
    fresh = [key for key in missing if key.startswith(FRESH_HEADS)]
    faults = {
        "missing": [key for key in missing if key not in fresh],
        "of another shape": sorted(str(key) for key in info.get("mismatched_keys", ())),
        "unreadable": sorted(str(message) for message in info.get("error_msgs", ())),
    }
    found = {kind: keys for kind, keys in faults.items() if keys}
    if found:
        text = "; ".join(f"{kind}: {keys[:5]}{' and more' if len(keys) > 5 else ''}" for kind, keys in found.items())
        raise ValueError(f"The checkpoint {path} does not fit the model: {text}. Use the model's own checkpoint.")
    return fresh
