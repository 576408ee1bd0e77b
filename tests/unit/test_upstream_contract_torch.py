"""Names of torch's FSDP2, DTensor, DeviceMesh that we lean on, private ones too: a new release fails here, by name."""

from __future__ import annotations

import inspect

import pytest
from torch import nn


def arguments(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_fully_shard_and_its_module():
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from hf_fsdpturbo import compat

    wanted = {"mesh", "reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params"}
    assert wanted <= set(arguments(fully_shard))
    assert callable(getattr(FSDPModule, compat.gradient_divide_factor_method()))
    if compat.has_force_sum_reduction():
        assert callable(FSDPModule.set_force_sum_reduction_for_comms)
    fields = {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"}
    assert fields <= set(arguments(MixedPrecisionPolicy))
    assert arguments(MixedPrecisionPolicy)[:2] == ["param_dtype", "reduce_dtype"]
    for name in ("reshard", "unshard", "set_requires_gradient_sync", "_get_fsdp_state"):
        assert callable(getattr(FSDPModule, name)), name


@pytest.fixture
def one_rank():
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_fsdp_records_what_it_manages(one_rank):
    """check_ownership reads these private records: torch has no public way to ask."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer = nn.Linear(4, 4)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    state = layer._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    infos = [parameter._module_info for group in groups for parameter in group.fsdp_params]
    assert {info.param_name for info in infos} == {"weight", "bias"}
    assert all(info.module is layer for info in infos)
    assert all(info.shared_modules == [] and info.shared_param_names == [] for info in infos)


def test_mesh_and_dtensor_names(one_rank):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    from hf_fsdpturbo import compat

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    assert mesh["a", "b"]._flatten("ab").mesh_dim_names == ("ab",)
    if compat.has_mesh_concatenate():
        assert arguments(DeviceMesh._concatenate) == ["device_mesh_list"]
    assert arguments(compute_local_shape_and_global_offset)[:3] == ["global_shape", "mesh", "placements"]
    wanted = {"local_tensor", "device_mesh", "placements", "run_check", "shape", "stride"}
    assert wanted <= set(arguments(DTensor.from_local))
    from torch.distributed.tensor import distribute_tensor

    assert "src_data_rank" in arguments(distribute_tensor)


def test_group_timeout_setter():
    from torch.distributed.distributed_c10d import _set_pg_timeout

    assert arguments(_set_pg_timeout) == ["timeout", "group"]
