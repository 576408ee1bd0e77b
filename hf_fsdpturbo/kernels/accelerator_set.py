"""The kernel set that ``kernel_config name: auto`` means on each accelerator, and how it is put into a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from hf_fsdpturbo.compat import OPTIONAL, is_available
from hf_fsdpturbo.kernels import elementwise, liger, npu_elementwise
from hf_fsdpturbo.kernels.rebinding import Undo


@dataclass
class Applied:
    """What one kernel set did: undos, lines for the summary, notices for the user, and how many modules changed."""

    undos: list[Undo] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    num_modules: int = 0


def apply_liger(model: nn.Module, device_type: str, asked_by: str) -> Applied:
    """Liger's rms_norm and rope on CUDA.

    Raises:
        ValueError: liger-kernel is missing, or the device is another.
    """
    if device_type != "cuda":
        raise ValueError(f"{asked_by}: Liger's kernels need CUDA, not {device_type}. Remove liger from name.")
    liger.load(asked_by)
    norms = elementwise.fuse_norms(model, liger.rms_norm, device_type)
    ropes = elementwise.fuse_rotary(model, liger.rotary, device_type, "liger")
    line = f"liger: rms_norm in {len(norms)} modules, rope in {len(ropes)} modeling files"
    return Applied([*norms, *ropes], [line], [], len(norms) + len(ropes))


def _cuda(model: nn.Module, device_type: str) -> Applied:
    if not is_available("liger_kernel"):
        how = OPTIONAL["liger_kernel"][1]
        return Applied(notices=[f"kernel_config auto on cuda is empty: liger-kernel is not installed ({how})."])
    return apply_liger(model, device_type, "kernel_config name 'auto'")


def _npu(model: nn.Module, device_type: str) -> Applied:
    npu_elementwise.load("kernel_config name 'auto'")
    norms = elementwise.fuse_norms(model, npu_elementwise.rms_norm, device_type)
    ropes = elementwise.fuse_rotary(model, npu_elementwise.rotary, device_type, "npu")
    mlps = elementwise.fuse_mlps(model, npu_elementwise.swiglu, device_type)
    line = (
        f"auto: npu_rms_norm in {len(norms)} modules, npu_rotary_mul in {len(ropes)} modeling files, npu_swiglu in "
        f"{len(mlps)} MLPs; experts run in the dispatcher"
    )
    return Applied([*norms, *ropes, *mlps], [line], [], len(norms) + len(ropes) + len(mlps))


def _cpu(model: nn.Module, device_type: str) -> Applied:
    return Applied(notices=["kernel_config auto is empty on cpu: the model's own code runs."])


AUTO: dict[str, Callable[[nn.Module, str], Applied]] = {"cuda": _cuda, "npu": _npu, "cpu": _cpu}


def apply_auto(model: nn.Module, device_type: str) -> Applied:
    """Apply this accelerator's set.

    Raises:
        ValueError: it has none; the message lists those that have one.
    """
    if device_type not in AUTO:
        raise ValueError(f"kernel_config name 'auto' knows no kernels for {device_type}. Known: {sorted(AUTO)}.")
    return AUTO[device_type](model, device_type)
