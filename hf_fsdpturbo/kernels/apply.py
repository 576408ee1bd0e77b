"""Kernels: the table of kernel sets, and the one call that puts them into a model before it is sharded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from hf_fsdpturbo.arguments import KERNEL_NAMES, KernelParams
from hf_fsdpturbo.kernels.accelerator_set import Applied, apply_auto, apply_liger
from hf_fsdpturbo.kernels.aux_loss import apply_aux_loss
from hf_fsdpturbo.kernels.linear_attention import apply_linear_attention, choose
from hf_fsdpturbo.kernels.rebinding import Undo, linear_attention_layers
from hf_fsdpturbo.launch_config import rank, set_environment_default

logger = logging.getLogger(__name__)

FLA_NAME = "flash-linear-attention"


@dataclass
class KernelReport:
    """What runs where: ``lines`` for the summary, ``notices`` (already logged on rank 0), and the way back."""

    lines: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    undos: list[Undo] = field(default_factory=list)

    def close(self) -> None:
        """Put every original back. Harmless when called twice; a model that is collected does it by itself."""
        while self.undos:
            self.undos.pop()()


def _auto(model: nn.Module, params: KernelParams, device_type: str, applied: set[str]) -> Applied:
    result = apply_auto(model, device_type)
    if device_type == "cuda" and result.num_modules:
        applied.add("liger")
    return result


def _liger(model: nn.Module, params: KernelParams, device_type: str, applied: set[str]) -> Applied:
    result = Applied(lines=["liger: already applied by auto"])
    if "liger" not in applied:
        result = apply_liger(model, device_type, "kernel_config name 'liger'")
        if not result.num_modules:
            raise ValueError(
                f"kernel_config name 'liger' matches nothing in {type(model).__name__}: it has no RMSNorm and no "
                "rotary embedding that Liger's kernels compute. Remove liger from name."
            )
    applied.add("liger")
    return result


def _fla(model: nn.Module, params: KernelParams, device_type: str, applied: set[str]) -> Applied:
    if next(linear_attention_layers(model), None) is None:
        operators = params.include_kernels or "its operators"
        raise ValueError(
            f"kernel_config name {FLA_NAME!r}: {operators} match no module of {type(model).__name__}, which has no "
            f"linear-attention layer. Remove {FLA_NAME} from name."
        )
    # FlashQLA sits in front of FLA's kernels and ignores chunk_size; FLA reads the switch at its first call.
    in_force = set_environment_default("FLA_FLASH_QLA", "0")
    if in_force != "0":
        notice = f"FLA_FLASH_QLA={in_force} is set: where FlashQLA runs, chunk_size={params.chunk_size} has no effect."
        return Applied(notices=[notice])
    return Applied()


KERNELS: dict[str, Callable[[nn.Module, KernelParams, str, set[str]], Applied]] = {
    "auto": _auto,
    FLA_NAME: _fla,
    "liger": _liger,
}
assert tuple(KERNELS) == KERNEL_NAMES, "arguments/params.py and this table must name the same sets in the same order"


def apply_kernels(
    model: nn.Module, params: KernelParams | None, device_type: str, cp_size: int = 1, length: int | None = None
) -> KernelReport:
    """Put the kernel sets of ``kernel_config`` into ``model``, in order; call it before sharding.

    A model with linear attention always gets a rule that keeps packed documents apart: FLA's where it is chosen and
    proves itself on the device, else our PyTorch one. On CUDA the aux loss is one pass where that proves itself.
    Otherwise a model is untouched when ``params`` is None.

    Args:
        model: on meta or with real weights.
        params: None for a run without kernel_config.
        device_type: where the model will run ("cpu", "cuda", "npu").
        cp_size: ranks over which context parallelism divides the heads.
        length: positions of a row, where the arguments tell; FLA is tried at it.

    Raises:
        ValueError: a set matches nothing, a package is missing, or a second model in this process has other settings;
            everything done so far is put back first.
    """
    report = KernelReport()
    applied: set[str] = set()
    try:
        for name in params.name if params is not None else ():
            _add(report, KERNELS[name](model, params, device_type, applied))  # type: ignore[arg-type]
        _add(report, apply_aux_loss(model, device_type))
        if next(linear_attention_layers(model), None) is not None:
            choice, lines, notices = choose(model, params, device_type, cp_size, length)
            _add(report, Applied(apply_linear_attention(model, choice), lines, notices))
    except (ValueError, ImportError):
        report.close()
        raise
    if rank() == 0:
        for notice in report.notices:
            logger.warning(notice)
        for line in report.lines:
            logger.info(line)
    return report


def _add(report: KernelReport, done: Applied) -> None:
    report.undos += done.undos
    report.lines += done.lines
    report.notices += done.notices
