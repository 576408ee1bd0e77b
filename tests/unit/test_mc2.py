"""MC2's limits: each refused by its name before anything runs."""

import pytest
import torch

from hf_fsdpturbo.dispatch import mc2
from hf_fsdpturbo.ops import npu
from tests.support import npu_stand_in


@pytest.fixture
def a3(monkeypatch):
    npu_stand_in.install(monkeypatch)


def test_what_fits(a3):
    mc2.check_mc2(8, 128, "npu", 8, torch.bfloat16)
    mc2.check_mc2(128, 128, "npu", 2, torch.float16)


@pytest.mark.parametrize(("arguments", "words"), [
    ((4, 64, "npu", 8, torch.bfloat16), "ep_size is 4"),
    ((8, 512, "npu", 8, torch.bfloat16), "64 experts a rank.*512 experts in all"),
    ((8, 64, "npu", 1, torch.bfloat16), "top-k is 1"),
    ((8, 64, "npu", 9, torch.bfloat16), "top-k is 9"),
    ((8, 64, "npu", 8, torch.float32), "float32"),
    ((8, 64, "cuda", 8, torch.bfloat16), "'cuda', not an Ascend A3"),
])  # fmt: skip
def test_what_does_not(a3, arguments, words):
    with pytest.raises(ValueError, match=words):
        mc2.check_mc2(*arguments)


def test_another_ascend(a3, monkeypatch):
    monkeypatch.setattr(npu, "device_name", lambda: "Ascend910B1")
    with pytest.raises(ValueError, match="Ascend910B1"):
        mc2.check_mc2(8, 64, "npu")


def test_refused_when_made():
    """On this machine, before any group or training exists."""
    with pytest.raises(ValueError, match="ep_dispatcher='mc2' cannot run here.*Use 'fused'"):
        mc2.Mc2Dispatcher(None, 64)
