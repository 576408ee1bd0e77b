"""The reference model of preference trainers (DPO, KTO): sharded like the policy, however it is given."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_fsdpturbo.arguments import FSDPTurboArguments
from hf_fsdpturbo.lora.adapter_files import is_adapter, is_peft
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState
from hf_fsdpturbo.parallelize.build import build_model, shard_given_model
from hf_fsdpturbo.parallelize.trainer_family import refuse_online, trl_classes
from hf_fsdpturbo.ranks import everyone
from hf_fsdpturbo.sharding.outer_fsdp import reshard
from hf_fsdpturbo.shards import local_tensor
from hf_fsdpturbo.trainer.given_arguments import GivenArguments


def add_reference(
    trainer_class: type,
    given: GivenArguments,
    config: FSDPTurboArguments,
    state: FSDPTurboParallelState | None,
    *,
    with_images: bool = False,
) -> None:
    """Replace ``ref_model`` in the trainer's arguments by a sharded model; call it before the policy is sharded.

    A path or a model object is sharded; None becomes a second load of the policy's path, unless the trainer will not
    keep a reference (an adapter that can be disabled, ``precompute_ref_log_probs``) or has no such argument.

    Raises:
        ValueError: the reference is the policy, or None with a policy that came from no path; a trainer that loads a
            reference past us.
    """
    if state is not None:
        refuse_online(trainer_class)
    if not given.takes("ref_model"):
        return
    policy, reference = given.get("model"), given.get("ref_model")
    if reference is None:
        if _needs_none(given, config, state is not None):
            return
        policy_config = getattr(policy, "config", None)
        reference = policy if isinstance(policy, str) else getattr(policy_config, "_name_or_path", "")
        if not reference:
            raise ValueError(
                "ref_model is None, but model is an object that was not loaded from a path (config._name_or_path is "
                "empty): there is nothing to load the reference from. Pass ref_model (a path or another model object)."
            )
    if reference is policy and not isinstance(policy, str):
        raise ValueError("ref_model and model are the same object. Leave ref_model out, or pass another one.")
    if isinstance(reference, str):
        as_policy, own = _as_policy(policy), given.get("ref_model") is not None
        reference, _ = build_model(
            trainer_class,
            reference,
            config,
            state,
            defaults=as_policy,
            use_dcp_path=not own,
            with_images=with_images,
            quantization_config=given.get("quantization_config"),
        )
    elif isinstance(reference, nn.Module):
        reference, _ = shard_given_model(reference, config, state, use_dcp_path=False, with_images=with_images)
    given["ref_model"] = reference


def is_own_reference(given: GivenArguments, sharded: bool = True) -> bool:
    """Whether a loaded adapter, as it is now, is the reference: TRL keeps a copy of it under the name ``ref``."""
    adapted = is_peft(given.get("model")) or (sharded and is_adapter(given.get("model")))
    return adapted and given.takes("ref_model") and given.get("ref_model") is None


def _needs_none(given: GivenArguments, config: FSDPTurboArguments, sharded: bool) -> bool:
    adapted = given.get("peft_config") is not None or is_own_reference(given, sharded)
    return adapted or bool(getattr(config, "precompute_ref_log_probs", False))


def _as_policy(policy: Any) -> dict[str, Any]:
    """What TRL takes over from a policy that is an object when it loads the reference."""
    if isinstance(policy, nn.Module):
        return {"dtype": policy.dtype, "attn_implementation": policy.config._attn_implementation}  # type: ignore[union-attr]
    return {}


def hash_shards(module: nn.Module) -> str:
    """Hash of a sharded model's weights: every rank its own shards, then all digests together; collective.

    In place of ``trl.trainer.utils.hash_module`` (TRL 1.16), which calls ``.numpy()`` on DTensors. Can go when TRL
    hashes DTensors itself.
    """
    reshard(module)
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        local = local_tensor(tensor)
        digest.update(f"{name} {local.dtype} {tuple(local.shape)}".encode())
        digest.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashlib.sha256("".join(everyone(digest.hexdigest())).encode()).hexdigest()


@contextlib.contextmanager
def trainer_functions_replaced(trainer_class: type, **functions: Any) -> Iterator[None]:
    """While open, the TRL modules of a trainer's classes see these functions, where they use such a name."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for module_name in dict.fromkeys(cls.__module__ for cls in trl_classes(trainer_class).values()):
        names = vars(sys.modules[module_name])
        before += [(names, name, names[name]) for name in functions if name in names]
    for names, name, _ in before:
        names[name] = functions[name]
    try:
        yield
    finally:
        for names, name, own in before:
            names[name] = own
