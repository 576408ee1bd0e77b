"""FLA's trial before training: a failure on one rank makes all ranks use PyTorch, for the same reason."""

import pytest
import torch
import torch.distributed as dist

from hf_fsdpturbo.arguments import KernelParams
from hf_fsdpturbo.kernels.apply import apply_kernels
from tests.support.fla_stand_in import FlaStandIn
from tests.support.linear_attention_model import small_qwen3_5_moe
from tests.support.spawn import init_gloo, run_ranks


def choose_with_one_broken(broken: int | None) -> tuple[list[str], int]:
    """Rank function: notices, and how often FLA's rule is called in a forward."""
    init_gloo()
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in = FlaStandIn().install(monkeypatch)
        if dist.get_rank() == broken:
            stand_in.error = RuntimeError("no kernel here")
        with torch.device("meta"), torch.no_grad():  # as when from_pretrained builds it
            report = apply_kernels(small_qwen3_5_moe(), KernelParams(["flash-linear-attention"], None, 16), "cpu")
        report.close()
        model = small_qwen3_5_moe()
        report = apply_kernels(model, KernelParams(["flash-linear-attention"], None, 16), "cpu")
        stand_in.error = None
        stand_in.calls.clear()
        model(input_ids=torch.arange(20)[None], use_cache=False)
        report.close()
        return report.notices, sum(name == "chunk" for name, *_ in stand_in.calls)


def test_all_ranks_use_pytorch_if_fla_fails_on_one():
    outcomes = run_ranks(choose_with_one_broken, 2, 1)
    assert [calls for _, calls in outcomes] == [0, 0]
    (first,), (second,) = (notices for notices, _ in outcomes)
    assert first == second
    assert "because on rank 1 of 2, flash-linear-attention's gated delta rule failed in a trial step" in first


def test_all_ranks_use_fla_where_it_works_on_all():
    assert [calls > 0 for _, calls in run_ranks(choose_with_one_broken, 2, None)] == [True, True]
