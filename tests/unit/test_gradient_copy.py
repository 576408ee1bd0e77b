"""FSDP's reduce-scatter buffer filled by copies equals the one it fills itself, bit for bit."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from hf_fsdpturbo.sharding import gradient_copy

ORIGINAL = getattr(
    collectives.foreach_reduce_scatter_copy_in, "__wrapped__", collectives.foreach_reduce_scatter_copy_in
)


def gradients(dtype):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    # divisible, short last chunk, empty last chunks, one row, a vector, a transposed view
    return [draw(8, 3), draw(7, 5), draw(5, 2, 2), draw(1, 4), draw(6), draw(3, 8).t()]


def buffer(of, world_size, dtype):
    columns = sum(-(-g.shape[0] // world_size) * g[:1].numel() for g in of)
    return torch.full((world_size * columns,), float("nan"), dtype=dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16])
def test_copies_equal_the_table(world_size, stored, reduced):
    of = gradients(stored)
    wanted, got = buffer(of, world_size, reduced), buffer(of, world_size, reduced)
    ORIGINAL([g.contiguous() for g in of], wanted, world_size)
    gradient_copy.copy_in_by_chunk(of, got, world_size)
    assert not got.isnan().any()
    assert torch.equal(got, wanted)


def test_only_large_units_take_the_copies(monkeypatch):
    taken = []
    monkeypatch.setattr(collectives, "foreach_reduce_scatter_copy_in", ORIGINAL)
    monkeypatch.setattr(gradient_copy, "copy_in_by_chunk", lambda *_: taken.append("copies"))
    gradient_copy.copy_large_gradients_by_chunk()
    installed = collectives.foreach_reduce_scatter_copy_in
    gradient_copy.copy_large_gradients_by_chunk()
    assert collectives.foreach_reduce_scatter_copy_in is installed, "wrapped twice"
    large = [torch.ones(2 * gradient_copy.LARGE_COPY // 4), torch.ones(2 * gradient_copy.LARGE_COPY // 4, 1)]
    for of, expected in ((large, ["copies"]), ([large[0], torch.ones(4)], []), (gradients(torch.float32), [])):
        taken.clear()
        installed([g.contiguous() for g in of], buffer(of, 2, torch.float32), 2)
        assert taken == expected, [tuple(g.shape) for g in of]


@pytest.fixture
def lone_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradient_of_a_sharded_layer() -> torch.Tensor:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    layer(torch.ones(2, 4)).square().sum().backward()
    return layer.weight.grad.full_tensor()


def test_fsdp_fills_its_buffer_through_the_name_we_replace(monkeypatch, lone_rank):
    """If FSDP called the function otherwise, the replacement would be dead in silence: a backward must run it."""
    copy, filled = gradient_copy.copy_in_by_chunk, []

    def counted(gradients, reduce_scatter_input, world_size):
        filled.append((len(gradients), world_size))
        copy(gradients, reduce_scatter_input, world_size)

    monkeypatch.setattr(collectives, "foreach_reduce_scatter_copy_in", ORIGINAL)
    expected = gradient_of_a_sharded_layer()
    assert filled == []
    monkeypatch.setattr(gradient_copy, "copy_in_by_chunk", counted)
    monkeypatch.setattr(gradient_copy, "LARGE_COPY", 0)
    gradient_copy.copy_large_gradients_by_chunk()
    assert torch.equal(gradient_of_a_sharded_layer(), expected)
    assert filled == [(2, 1)], "one call, for weight and bias, on one rank"


def test_arguments_of_the_function_we_replace():
    assert list(inspect.signature(ORIGINAL).parameters) == ["unsharded_grads", "reduce_scatter_input", "world_size"]
