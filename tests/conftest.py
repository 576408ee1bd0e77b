"""Shared by all tests: no network, one thread a process, and the fork server started early."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin the fork server's imports while unit tests run, if any distributed test is selected."""
    if any("distributed" in item.path.parts for item in items):
        from tests.support.spawn import start_fork_server

        start_fork_server()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """``tiny(kind, **save_tiny keywords) -> path``: each checkpoint is made once a session."""
    from tests.support.tiny_models import save_tiny

    made: dict[tuple, str] = {}

    def get(kind: str, **config) -> str:
        key = (kind, *sorted((k, repr(v)) for k, v in config.items()))
        if key not in made:
            directory: Path = tmp_path_factory.mktemp(kind)
            made[key] = save_tiny(kind, directory, **config)
        return made[key]

    return get


@pytest.fixture
def on_rank():
    """``on_rank(rank, shape, names) -> mesh`` of that rank in a world whose collectives do nothing."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank: int, shape: tuple[int, ...]):
        if dist.is_initialized():
            dist.destroy_process_group()
        size = int(torch.tensor(shape).prod())
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return init_device_mesh("cpu", shape, mesh_dim_names=tuple("abcd"[: len(shape)]))

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
