"""Sizes of a run and the device meshes made from them: checked first, in plain arithmetic, then built once a process.

Ranks are laid out with cp innermost, then ep, then efsdp, then edp, so that the exchange with the most traffic stays
inside a node. Eight ranks, cp_size 2, ep_size 2, efsdp_size 2 (edp 1):

    rank        0 1 | 2 3 | 4 5 | 6 7
    expert_cp   0 1 | 0 1 | 0 1 | 0 1
    ep          0 0 | 1 1 | 0 0 | 1 1
    efsdp       0 0 | 0 0 | 1 1 | 1 1
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hf_fsdpturbo import compat

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EXPERT_AXES = ("edp", "efsdp", "ep", "expert_cp")


def _positive(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field} must be a positive integer, but it is {value!r}. Set {field} to 1 or more.")
    return value


def _divides(field: str, value: int, of: str, total: int, fix: str) -> int:
    if total % value:
        raise ValueError(
            f"{field} ({value}) must divide {of} ({total}), but {total} % {value} = {total % value}. {fix}"
        )
    return total // value


@dataclass(frozen=True)
class Topology:
    """Sizes of one run: ``dp * cp == world``, ``edp * efsdp * ep == dp``, ``mp_replicate * mp_shard == world``."""

    world_size: int
    dp_size: int
    cp_size: int
    ep_size: int
    efsdp_size: int
    edp_size: int
    mp_replicate_size: int
    mp_shard_size: int

    @classmethod
    def resolve(
        cls,
        world_size: int,
        *,
        dp_size: int | None = None,
        cp_size: int = 1,
        ep_size: int = 1,
        efsdp_size: int | None = None,
        mp_replicate_size: int = 1,
        mp_shard_size: int | None = None,
    ) -> Topology:
        """Fill in the sizes that were left open and check all of them.

        Raises:
            ValueError: a size is not a positive integer or does not divide what it has to divide; the message names
                the field, its value, the rule and the fix.
        """
        world = _positive("world_size", world_size)
        cp = _positive("cp_size", cp_size)
        dp = _divides("cp_size", cp, "world_size", world, "Change cp_size or the number of processes.")
        if dp_size is not None and _positive("dp_size", dp_size) != dp:
            raise ValueError(
                f"dp_size ({dp_size}) * cp_size ({cp}) must equal world_size ({world}), but it is {dp_size * cp}. "
                f"Leave dp_size out, or set it to {dp}."
            )
        ep = _positive("ep_size", ep_size)
        per_ep = _divides("ep_size", ep, "dp_size", dp, "Choose an ep_size that divides world_size / cp_size.")
        efsdp = per_ep if efsdp_size is None else _positive("efsdp_size", efsdp_size)
        edp = _divides("efsdp_size", efsdp, "dp_size / ep_size", per_ep, f"Leave efsdp_size out to get {per_ep}.")
        replicate = _positive("mp_replicate_size", mp_replicate_size)
        shard = _divides("mp_replicate_size", replicate, "world_size", world, "Change mp_replicate_size.")
        if mp_shard_size is not None and _positive("mp_shard_size", mp_shard_size) != shard:
            raise ValueError(
                f"mp_replicate_size ({replicate}) * mp_shard_size ({mp_shard_size}) must equal world_size ({world}), "
                f"but it is {replicate * mp_shard_size}. Leave mp_shard_size out, or set it to {shard}."
            )
        return cls(world, dp, cp, ep, efsdp, edp, replicate, shard)

    @property
    def expert_shape(self) -> tuple[int, int, int, int]:
        """Shape of the expert parent mesh, axes ``(edp, efsdp, ep, expert_cp)``."""
        return self.edp_size, self.efsdp_size, self.ep_size, self.cp_size

    @property
    def expert_shard_size(self) -> int:
        """Ranks that share one expert's parameters: ``efsdp_size * cp_size``."""
        return self.efsdp_size * self.cp_size

    def to_dict(self) -> dict[str, int]:
        """Plain integers, for logs and ``topology.json``."""
        return asdict(self)


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
