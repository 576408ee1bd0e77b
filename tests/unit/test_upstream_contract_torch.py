"""Names of torch's FSDP2, DTensor, DeviceMesh that we lean on, private ones too: a new release fails here, by name."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
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
    records = [parameter for group in groups for parameter in group.fsdp_params]
    assert all(record.sharded_param.requires_grad for record in records)
    assert isinstance(type(records[0]).unsharded_param, property)
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


def test_what_dcp_writes_of_a_chunk():
    """``checkpoint/dcp_index.py`` writes these with three positions, and reads them by these names."""
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    info = _StorageInfo("__0_0.distcp", 5, 7)
    assert (info.relative_path, info.offset, info.length, info.transform_descriptors) == ("__0_0.distcp", 5, 7, None)
    fields = list(metadata.Metadata.__dataclass_fields__)
    assert fields[:4] == ["state_dict_metadata", "planner_data", "storage_data", "storage_meta"]
    assert list(metadata.TensorStorageMetadata.__dataclass_fields__) == ["properties", "size", "chunks"]
    assert list(metadata.ChunkStorageMetadata.__dataclass_fields__) == ["offsets", "sizes"]
    properties = pickle.dumps(metadata.TensorProperties(dtype=torch.bfloat16))
    assert metadata.TensorProperties(dtype=torch.bfloat16).__getstate__()[0] is torch.bfloat16
    assert b"_MEM_FORMAT_ENCODING" in properties
    assert b"_get_layout" in properties
    assert torch.serialization._get_layout("torch.strided") is torch.strided


def test_the_store_that_ranks_met_in():
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    assert arguments(_get_default_store) == []
    store = dist.PrefixStore("default", dist.HashStore())
    assert not store.check(["fsdpturbo/x"])
    store.set("fsdpturbo/x", "said")
    assert store.check(["fsdpturbo/x"])
    assert store.get("fsdpturbo/x") == b"said"
    assert store.delete_key("fsdpturbo/x")


def test_group_timeout_setter():
    from torch.distributed.distributed_c10d import _set_pg_timeout

    assert arguments(_set_pg_timeout) == ["timeout", "group"]


def test_private_functions_of_tensors_and_groups(one_rank):
    import torch.distributed as dist

    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    torch._foreach_mul_(tensors, torch.tensor(3.0))
    assert [tensor[0].item() for tensor in tensors] == [3.0, 6.0]
    norms = torch._foreach_norm(tensors, 2.0, dtype=torch.float32)
    torch.testing.assert_close(torch.stack(norms), torch.tensor([18.0, 108.0]).sqrt())
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.size() == 2


def test_private_records_of_modules():
    """A tensor put in a record is the module's parameter, buffer or child, without more ado."""

    layer = nn.Linear(2, 2)
    layer.register_buffer("table", torch.ones(1), persistent=False)
    layer.register_buffer("kept", torch.ones(1))
    assert layer._non_persistent_buffers_set == {"table"}
    other, table = nn.Parameter(torch.zeros(2, 2)), torch.zeros(1)
    layer._parameters["weight"], layer._buffers["table"] = other, table
    assert layer.weight is other
    assert layer.table is table
    outer = nn.ModuleDict({"inner": layer})
    outer._modules["inner"] = child = nn.Identity()
    assert outer["inner"] is child


def test_state_of_a_chain_of_schedulers():
    """checkpoint/scheduler.py follows the inner states, and leaves the milestones alone."""
    from torch.optim.lr_scheduler import ConstantLR, SequentialLR

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    chain = SequentialLR(optimizer, [ConstantLR(optimizer), ConstantLR(optimizer)], milestones=[2])
    state = chain.state_dict()
    assert state["_milestones"] == [2]
    assert [type(inner) for inner in state["_schedulers"]] == [dict, dict]
    assert all("base_lrs" in inner for inner in state["_schedulers"])


def test_a_tensor_can_note_what_is_done_with_it():
    """``torch._C.DisableTorchFunctionSubclass`` and ``tree_leaves``, through what is made of them."""
    from torch.utils._pytree import tree_leaves

    from hf_fsdpturbo.trainer.loss_scale import NotedNumber

    used: list[str] = []
    number = NotedNumber.of(torch.tensor(4), used)
    with torch._C.DisableTorchFunctionSubclass():
        assert isinstance(number + 0, torch.Tensor)
    moved = number.to(torch.float32).clone()
    assert moved.dtype.is_floating_point
    assert tree_leaves([{"a": moved}])[0] is moved
    assert moved.device.type == "cpu"
    assert torch.is_floating_point(moved)
    assert moved.dim() == 0
    assert used == [], "moving it and asking about it is not computing with it"
    loss = torch.tensor(8.0) / moved
    assert type(loss) is torch.Tensor
    assert float(loss) == 2.0
    assert used


def test_the_default_store_can_be_cloned(one_rank):
    from torch import distributed as dist

    store = dist.distributed_c10d._get_default_store()
    assert hasattr(store, "clone"), "each thread has a connection of its own"


def test_what_a_hanging_rank_asks_torch():
    import json

    from torch import autograd

    trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    assert "version" in trace
    assert isinstance(trace.get("entries", []), list)
    assert autograd.graph._engine_run_backward.__code__.co_filename.endswith("torch/autograd/graph.py")


def test_a_forward_inside_a_backward_is_told():
    import torch
    from torch.utils.checkpoint import checkpoint

    seen = []

    def layer(x):
        seen.append(torch._C._current_graph_task_id() != -1)
        return x * x

    checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True]
