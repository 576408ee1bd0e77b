"""The device meshes of a run, built once a process from sizes that ``topology.py`` has checked.

Ranks are laid out with cp innermost, then ep, then efsdp, then edp, so that the exchange with the most traffic stays
inside a node. Eight ranks, cp_size 2, ep_size 2, efsdp_size 2 (edp 1):

    rank        0 1 | 2 3 | 4 5 | 6 7
    expert_cp   0 1 | 0 1 | 0 1 | 0 1
    ep          0 0 | 1 1 | 0 0 | 1 1
    efsdp       0 0 | 0 0 | 1 1 | 1 1
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from hf_fsdpturbo import compat
from hf_fsdpturbo.topology import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EXPERT_AXES = ("edp", "efsdp", "ep", "expert_cp")


class FSDPTurboParallelState:
    """The meshes of this process; build it with :meth:`initialize`, read it with :func:`get_fsdpturbo_parallel_state`.

    Attributes:
        topology: the checked sizes.
        device_type: device type of every mesh ("cpu", "cuda", "npu").
        expert_mesh: parent mesh with axes ``(edp, efsdp, ep, expert_cp)``.
        ep_mesh: its ``ep`` axis; experts are ``Shard(0)`` on it.
        expert_fsdp_mesh: mesh of the experts' ``fully_shard``: one axis over efsdp and expert_cp, a replicate axis
            ``edp`` before it when ``edp_size > 1``.
        dense_mesh: mesh of the outer ``fully_shard``: one axis named ``fsdp`` (the only name under which PEFT takes
            global shapes), an axis ``replicate`` before it when ``mp_replicate_size > 1``.
        loader_mesh: axes ``(dp_shard, cp)``, the only names from which accelerate's data loader learns who shares a
            batch.
        cp_mesh: the ``cp`` axis of ``loader_mesh``.
    """

    def __init__(self, topology: Topology, device_type: str, timeout: timedelta | None) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.topology = topology
        self.device_type = device_type
        self.expert_mesh = init_device_mesh(device_type, topology.expert_shape, mesh_dim_names=EXPERT_AXES)
        self.ep_mesh = self.expert_mesh["ep"]
        self.expert_fsdp_mesh = self._expert_fsdp_mesh()
        self.dense_mesh = self._dense_mesh()
        self.loader_mesh = init_device_mesh(
            device_type, (topology.dp_size, topology.cp_size), mesh_dim_names=("dp_shard", "cp")
        )
        self.cp_mesh = self.loader_mesh["cp"]
        if timeout is not None:
            self._set_timeouts(timeout)

    def _expert_fsdp_mesh(self) -> DeviceMesh:
        """Shard axis over (efsdp, expert_cp): a cp rank holds other tokens' gradients of the same experts."""
        from torch.distributed.device_mesh import DeviceMesh

        replicated = self.topology.edp_size > 1
        if self.topology.cp_size == 1:
            return self.expert_mesh["edp", "efsdp"] if replicated else self.expert_mesh["efsdp"]
        flat = self.expert_mesh["efsdp", "expert_cp"]._flatten("efsdp_expert_cp")
        return DeviceMesh._concatenate([self.expert_mesh["edp"], flat]) if replicated else flat

    def _dense_mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        sizes = self.topology
        if sizes.mp_replicate_size == 1:
            return init_device_mesh(self.device_type, (sizes.world_size,), mesh_dim_names=("fsdp",))
        return init_device_mesh(
            self.device_type, (sizes.mp_replicate_size, sizes.mp_shard_size), mesh_dim_names=("replicate", "fsdp")
        )

    def _set_timeouts(self, timeout: timedelta) -> None:
        """Give every mesh group the run's timeout; otherwise it takes the backend's 10 or 30 minutes."""
        from torch.distributed.distributed_c10d import _set_pg_timeout

        meshes = (self.expert_mesh, self.expert_fsdp_mesh, self.dense_mesh, self.loader_mesh)
        groups = {id(g): g for mesh in meshes for axis in range(mesh.ndim) if (g := mesh.get_group(axis)) is not None}
        if self.device_type in ("cpu", "cuda"):  # HCCL has no setter; there HCCL_EXEC_TIMEOUT governs
            for group in groups.values():
                _set_pg_timeout(timeout, group)

    @classmethod
    def initialize(
        cls, topology: Topology, device_type: str, *, timeout: timedelta | None = None
    ) -> FSDPTurboParallelState:
        """Build the process's meshes. Again with the same sizes it returns what exists.

        Raises:
            RuntimeError: meshes with other sizes exist already in this process.
        """
        global _STATE
        if _STATE is not None:
            if _STATE.topology == topology and _STATE.device_type == device_type:
                return _STATE
            raise RuntimeError(
                f"FSDPTurbo meshes already exist in this process for {_STATE.topology} on {_STATE.device_type} and "
                f"cannot become {topology} on {device_type}. Use the same sizes, or start a new process."
            )
        compat.let_gloo_finish_at_exit()  # on accelerators too: background saves have a gloo group
        _STATE = cls(topology, device_type, timeout)
        return _STATE


_STATE: FSDPTurboParallelState | None = None


def get_fsdpturbo_parallel_state() -> FSDPTurboParallelState:
    """The process's parallel state.

    Raises:
        RuntimeError: no trainer has built it yet, or the run has one process and needs none.
    """
    if _STATE is None:
        raise RuntimeError("No FSDPTurbo parallel state yet: the trainer builds it, in runs of two processes or more.")
    return _STATE
