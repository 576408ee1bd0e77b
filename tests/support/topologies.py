"""Several topologies one after another in the same ranks, for tests that need no trainer."""

from __future__ import annotations

from typing import Any

from hf_fsdpturbo import parallel_state
from hf_fsdpturbo.parallel_state import FSDPTurboParallelState, Topology


def fresh_state(world_size: int, **sizes: Any) -> FSDPTurboParallelState:
    """Meshes of other sizes than before: the process's state is forgotten first, which only tests may do."""
    parallel_state._STATE = None
    return FSDPTurboParallelState.initialize(Topology.resolve(world_size, **sizes), "cpu")


def plain_arguments(**fields: Any) -> Any:
    """``FSDPTurboTrainingArguments`` of a small fp32 CPU run."""
    import tempfile

    from hf_fsdpturbo import FSDPTurboTrainingArguments

    fields = {"output_dir": tempfile.mkdtemp(prefix="args_"), "use_cpu": True, "report_to": "none", **fields}
    return FSDPTurboTrainingArguments(**fields)
