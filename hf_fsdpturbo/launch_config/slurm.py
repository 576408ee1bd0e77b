"""What Slurm says of the machines of this step: how many, which one this is, who the first is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_fsdpturbo.launch_config.environment import _integer, variable

_PORTS = range(10_000, 30_000)
"""Below the ports that Linux gives to outgoing connections; a job's number chooses one, the same on every machine."""


@dataclass(frozen=True)
class SlurmStep:
    """A step (``srun``) over several machines, one task on each.

    Attributes:
        nnodes: machines.
        node_rank: which one this is.
        head: name of the first.
        port: where its launcher listens.
    """

    nnodes: int
    node_rank: int
    head: str
    port: int


def slurm_step() -> SlurmStep | None:
    """The step this process belongs to; None outside Slurm and on one machine.

    Raises:
        ValueError: a job of several machines without ``srun``, or more than one task on a machine.
    """
    job = variable("SLURM_JOB_ID")
    if job is None:
        return None
    nodes = _integer("SLURM_STEP_NUM_NODES", 0)
    if nodes == 0:
        held = _integer("SLURM_JOB_NUM_NODES", _integer("SLURM_NNODES", 1))
        if held > 1:
            raise ValueError(
                f"SLURM_JOB_NUM_NODES={held}, but this is not started by srun, so the other machines would not take "
                "part. Write srun --ntasks-per-node=1 before the command, or give --nnodes 1 for this machine alone."
            )
        return None
    tasks = _integer("SLURM_STEP_NUM_TASKS", nodes)
    if tasks > nodes:
        raise ValueError(
            f"SLURM_STEP_NUM_TASKS={tasks} on {nodes} machine(s): this command starts the processes of a machine "
            "itself (--nproc). Start it once on each: srun --ntasks-per-node=1, or give --nnodes."
        )
    if nodes == 1:
        return None
    names = variable("SLURM_STEP_NODELIST") or variable("SLURM_JOB_NODELIST") or ""
    if not names or variable("SLURM_NODEID") is None:
        raise ValueError(
            "SLURM_STEP_NODELIST and SLURM_NODEID must be set for a step of several machines. Give --nnodes, "
            "--node_rank and --rdzv_endpoint instead."
        )
    port = _PORTS[int(job) % len(_PORTS)] if job.isdecimal() else _PORTS[0]
    return SlurmStep(nodes, _integer("SLURM_NODEID", 0), first_host(names), port)


def first_host(names: str) -> str:
    """The first machine of a Slurm list: ``gpu[07-09,12],login`` gives ``gpu07``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", names)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else names)
