"""Layouts that fit, ranked by what they cost beside the plain work: bytes exchanged and recompute; then by memory."""

from __future__ import annotations

from dataclasses import dataclass

from hf_fsdpturbo.parallelize.kept_activations import choices
from hf_fsdpturbo.plan.exchanged import Sent, sent
from hf_fsdpturbo.plan.peak import GIB, Moment, highest
from hf_fsdpturbo.plan.planned_run import RECOMPUTES, Asked, PlannedRun
from hf_fsdpturbo.plan.shape import ModelShape, check_fits

FREE = 2.0  # GiB that CUDA, NCCL and fragments are left
COMPUTE = 300e12  # operations a second that recompute runs at


@dataclass(frozen=True)
class Candidate:
    """A layout, its highest moment, and what it sends."""

    run: PlannedRun
    peak: Moment
    sent: Sent
    again: float  # seconds of a micro-step's recompute

    @property
    def seconds(self) -> float:
        """Of exchange and recompute, nothing hidden: to rank layouts, not to predict time."""
        return self.sent.seconds + self.again

    @property
    def rank(self) -> tuple[float, int]:
        return round(self.seconds, 4), self.peak.total


def recomputed(shape: ModelShape, run: PlannedRun) -> float:
    """Seconds of a micro-step's recompute: matmuls of the layers; experts' up with ``full``, their down never."""
    if run.recompute == "off":
        return 0.0
    dense = sum(unit.numel for unit in shape.layers)
    up = 2 / 3 * shape.expert_numel * choices(shape.config) / max(shape.num_experts, 1)
    return 2 * run.tokens * (dense + (up if run.recompute == "full" else 0)) / COMPUTE


def fits(peak: Moment, memory: float) -> bool:
    """Whether a peak leaves ``FREE`` of a device of ``memory`` GiB."""
    return peak.total / GIB + FREE <= memory


def search(shape: ModelShape, asked: Asked) -> list[Candidate]:
    """Layouts of the devices that fit, best first.

    Sizes that were given stay: tried are ``ep_size`` and ``efsdp_size`` where they are None, and a recompute where
    none was given.
    """
    devices, cp = asked.devices, asked.sizes.get("cp_size") or 1
    dp = devices // cp
    eps = [asked.sizes["ep_size"]] if asked.sizes.get("ep_size") else [n for n in range(1, dp + 1) if dp % n == 0]
    if not shape.num_experts:
        eps = [1]
    recomputes = [asked.settings["recompute"]] if asked.settings.get("recompute") else RECOMPUTES
    found = []
    for ep in eps:
        given = asked.sizes.get("efsdp_size")
        for efsdp in [given] if given else sorted({dp // ep, 1}):
            for recompute in recomputes:
                try:
                    run = asked.run(ep_size=ep, efsdp_size=efsdp, recompute=recompute)
                    check_fits(shape, run)
                except ValueError:
                    continue  # sizes that a run would refuse
                peak = highest(shape, run)
                if fits(peak, asked.memory):
                    found.append(Candidate(run, peak, sent(shape, run), recomputed(shape, run)))
    return sorted(found, key=lambda candidate: candidate.rank)
