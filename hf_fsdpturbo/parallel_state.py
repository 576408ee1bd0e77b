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
from hf_fsdpturbo.node_groups import NodeGroups, make_node_groups
from hf_fsdpturbo.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
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
        ep_nodes: the nodes of this rank's ep group; None where experts exchange in one stage.
    """

    def __init__(self, topology: Topology, device_type: str, timeout: timedelta | None) -> None:
        self.topology = topology
        self.device_type = device_type
        self._alone: ProcessGroup | None = None
        self.expert_mesh = self._mesh(topology.expert_shape, EXPERT_AXES)
        self.ep_mesh = self.expert_mesh["ep"]
        self.expert_fsdp_mesh = self._expert_fsdp_mesh()
        self.dense_mesh = self._dense_mesh()
        self.loader_mesh = self._mesh((topology.dp_size, topology.cp_size), ("dp_shard", "cp"))
        self.cp_mesh = self.loader_mesh["cp"]
        self.ep_nodes = self._ep_nodes()
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
        sizes = self.topology
        if sizes.mp_replicate_size == 1:
            return self._mesh((sizes.world_size,), ("fsdp",))
        return self._mesh((sizes.mp_replicate_size, sizes.mp_shard_size), ("replicate", "fsdp"))

    def _mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """A mesh over all ranks in order, with groups as torch makes them but for axes of size 1.

        For those torch makes one group a rank, and every rank takes part in making each of them (3,072 calls at 1,024
        ranks). Here all of them share one group, which this rank makes by itself.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        real = [(name, size) for name, size in zip(names, shape, strict=True) if size > 1]
        if len(real) == len(names) or not real or self._makes_groups_together():
            return init_device_mesh(self.device_type, shape, mesh_dim_names=names)
        sizes, own = tuple(size for _, size in real), tuple(name for name, _ in real)
        mesh = init_device_mesh(self.device_type, sizes, mesh_dim_names=own)
        groups = [mesh.get_group(name) if name in own else self._group_alone() for name in names]
        ranks = torch.arange(dist.get_world_size(), device="cpu").view(shape)
        return DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=names)

    @staticmethod
    def _makes_groups_together() -> bool:
        """NCCL bound to its device splits the world's communicator for a new group: that needs every rank's call."""
        import torch.distributed as dist

        return getattr(dist.group.WORLD, "bound_device_id", None) is not None

    def _ep_nodes(self) -> NodeGroups | None:
        """Two groups a rank, beside the meshes: an axis more would make a group for every slice of all other axes."""
        sizes = self.topology
        if sizes.ep_nodes == 1:
            return None
        ep_groups = self.expert_mesh.mesh.transpose(2, 3).reshape(-1, sizes.ep_size).tolist()
        return make_node_groups(ep_groups, sizes.ep_nodes, all_ranks_take_part=self._makes_groups_together())

    def _group_alone(self) -> ProcessGroup:
        """The group of this rank only: no other rank takes part in making it."""
        import torch.distributed as dist

        if self._alone is None:
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="mesh_alone")
        return self._alone

    def _set_timeouts(self, timeout: timedelta) -> None:
        """Give every mesh group the run's timeout; otherwise it takes the backend's 10 or 30 minutes."""
        from torch.distributed.distributed_c10d import _set_pg_timeout

        meshes = (self.expert_mesh, self.expert_fsdp_mesh, self.dense_mesh, self.loader_mesh)
        groups = {id(g): g for mesh in meshes for axis in range(mesh.ndim) if (g := mesh.get_group(axis)) is not None}
        if self.ep_nodes is not None:
            groups |= {id(group): group for group in (self.ep_nodes.across, self.ep_nodes.inside)}
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
        compat.let_redistribute_keep_axes_apart()
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
