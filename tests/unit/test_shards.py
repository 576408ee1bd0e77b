"""A local tensor as a shard stays where it lies, also on the host beside an accelerator's mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hf_fsdpturbo.shards import like


@pytest.fixture
def sharded():
    """A meta DTensor ``[4, 3]`` on rank 1 of a mesh of two CUDA devices, which need not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    mesh = DeviceMesh("cuda", torch.arange(2), mesh_dim_names=("fsdp",), _init_backend=False, _rank=1)
    shape = torch.Size((4, 3))
    local = torch.empty(2, 3, device="meta")
    yield DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(3, 1))
    dist.destroy_process_group()


@pytest.mark.parametrize("contiguous", [True, False])
def test_offloaded_shard_stays_on_the_host(sharded, contiguous):
    local = torch.randn(2, 3) if contiguous else torch.randn(3, 2).t()
    made = like(sharded, local)
    assert isinstance(made, DTensor)
    assert (made.shape, made.placements, made.device_mesh) == (sharded.shape, sharded.placements, sharded.device_mesh)
    assert made.to_local().device.type == "cpu"
    assert torch.equal(made.to_local(), local)
